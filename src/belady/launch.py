"""Run an unmodified script under belady: its roots are found while it runs."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._pytree import tree_iter

from belady.eager.limits import Limits
from belady.errors import BeladyError, StaleValueError
from belady.virtual import IterationStats, VirtualMemory

INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How a script is run.

    Attributes
    ----------
    limits
        What it may use.
    module
        Whether the script is named as a module, as in ``python -m``.
    iterations
        End the script at the first call after so many iterations; None lets it run.
    recorded
        Whether one steady iteration is recorded event by event.
    """

    limits: Limits
    module: bool = False
    iterations: int | None = None
    recorded: bool = False


@dataclass(frozen=True, slots=True)
class Launched:
    """A script that has run.

    Attributes
    ----------
    exit_code
        As python would have given it; 0 when it was ended after enough iterations.
    vm
        What managed it, closed; None when no root was called.
    """

    exit_code: int
    vm: VirtualMemory | None


def run_script(
    path: str,
    arguments: Sequence[str],
    *,
    options: LaunchOptions,
    progress: Callable[[IterationStats], None] | None = None,
) -> Launched:
    """Run the script at ``path`` (or the module of that name) as ``__main__``.

    What the script raises is shown as python would show it.

    Parameters
    ----------
    arguments
        What the script finds in ``sys.argv[1:]``.
    progress
        Called after each iteration.

    Raises
    ------
    OSError
        If there is no such script, or it cannot be read.
    BeladyError
        If belady could not do what was asked, e.g. the budget is infeasible. A value that the
        script changed in place is the script's error and is shown as such.
    """
    with _as_main(path, arguments, options.module) as execute, _Roots(options, progress) as roots:
        code = _exit_code(execute)
    return Launched(code, roots.vm)


class _Enough(BaseException):
    """Ends the script: as many iterations have run as were asked for."""


class _Calls(threading.local):
    """Module calls under way on this thread, outermost first."""

    def __init__(self) -> None:
        self.stack: list[torch.nn.Module] = []


class _Roots:
    """Finds the roots while the script runs and gives them to one `VirtualMemory`.

    torch gives its global hooks no keyword arguments. A hook is handed them if its id is in
    the module's own table of such hooks; so `_before`, which runs first, puts the id of
    `_enter` there for the outermost calls.
    """

    def __init__(
        self, options: LaunchOptions, progress: Callable[[IterationStats], None] | None
    ) -> None:
        self.vm: VirtualMemory | None = None
        self._options = options
        self._progress = progress
        self._calls = _Calls()
        self._added: WeakSet[torch.nn.Module] = WeakSet()
        self._iterations = 0
        self._enter_id = -1
        self._undo = ExitStack()

    def __enter__(self) -> _Roots:
        # torch.compile warns that global hooks see its wrapper too. They are meant to.
        self._undo.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there")
        before = register_module_forward_pre_hook(self._before)
        enter = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._after, always_call=True)
        self._enter_id = enter.id
        for handle in (before, enter, after):
            self._undo.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        if self.vm is not None:
            self.vm.close()

    def _before(self, module: torch.nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        stack = self._calls.stack
        if stack and stack[0] is module:
            # The last call of it was interrupted: no hook saw its end.
            stack.clear()
        if not stack:
            limit = self._options.iterations
            if limit is not None and self._iterations >= limit:
                raise _Enough
            module._forward_pre_hooks_with_kwargs[self._enter_id] = True
        stack.append(module)

    def _enter(
        self, module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        if kwargs is None:
            return
        del module._forward_pre_hooks_with_kwargs[self._enter_id]
        if module not in self._added and _is_root(module, args, kwargs):
            self._add(module, args, kwargs)

    def _after(self, module: torch.nn.Module, _: Any, __: Any) -> None:
        if torch.compiler.is_compiling():
            return
        stack = self._calls.stack
        # Calls inside this one that were interrupted are still above it.
        while any(call is module for call in stack):
            if stack.pop() is module:
                break

    def _add(self, module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if self.vm is None:
            self.vm = VirtualMemory([], self._options.limits)
            self.vm.listeners.append(self._count)
            if self._options.recorded:
                self.vm.record()
        self.vm.add(module, args, kwargs)
        self._added.add(module)

    def _count(self, stats: IterationStats) -> None:
        self._iterations += 1
        if self._progress is not None:
            self._progress(stats)


def _is_root(module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> bool:
    if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
        return False  # the second: a checkpoint that replays its forward inside backward
    if getattr(module, "_is_replica", False):
        return False  # nn.DataParallel calls copies of a root on other threads
    if any(parameter.requires_grad for parameter in module.parameters()):
        return True
    inputs = tree_iter((args, dict(kwargs)))
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in inputs)


@contextmanager
def _as_main(path: str, arguments: Sequence[str], module: bool) -> Iterator[Callable[[], object]]:
    """Set ``sys.argv`` and ``sys.path`` as python does; gives what runs the script."""
    argv, search, entries = sys.argv, sys.path, list(sys.path)
    if not module and not os.path.isdir(path):
        open(path, "rb").close()  # now, so that its absence is not taken for the script's error
    try:
        sys.argv = [path, *arguments]
        sys.path[:1] = [os.getcwd() if module else _folder(path)]
        if module:
            _require_module(path)
            yield lambda: runpy.run_module(path, run_name="__main__", alter_sys=True)
        else:
            yield lambda: runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv, sys.path = argv, search
        sys.path[:] = entries


def _folder(path: str) -> str:
    real = os.path.realpath(path)
    return real if os.path.isdir(real) else os.path.dirname(real)


def _require_module(name: str) -> None:
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise FileNotFoundError(f"module {name!r} cannot be found: {error}") from error
    if found is None:
        raise FileNotFoundError(f"there is no module {name!r}")


def _exit_code(execute: Callable[[], object]) -> int:
    """Run the script and say what python would exit with."""
    try:
        execute()
    except _Enough:
        return 0
    except SystemExit as error:
        return _exit_status(error.code)
    except KeyboardInterrupt as error:
        _show(error)
        return INTERRUPTED
    except BeladyError as error:
        if not isinstance(error, StaleValueError):
            raise
        _show(error)
        return 1
    except BaseException as error:  # whatever it is, python would show it and exit with 1
        _show(error)
        return 1
    return 0


def _exit_status(code: object) -> int:
    if code is None or isinstance(code, int):
        return code or 0
    sys.stderr.write(f"{code}\n")
    return 1


def _show(error: BaseException) -> None:
    trace = error.__traceback__
    while trace is not None and _is_ours(trace):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _is_ours(trace: TracebackType) -> bool:
    return trace.tb_frame.f_globals.get("__name__") in (__name__, "runpy")
