"""Run an unmodified script under belady: its roots are found while it runs."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import thread as futures
from dataclasses import dataclass
from itertools import dropwhile
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch
from torch._dynamo.eval_frame import skip_code
from torch.utils._pytree import tree_iter

from belady import script
from belady.eager.limits import Limits
from belady.errors import BeladyError, StaleValueError, TraceError
from belady.forwards import is_scripted
from belady.measure.stats import IterationStats
from belady.virtual import VirtualMemory

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
        End the script at the first call after so many iterations, two at least; None lets it run.
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
    unmanaged
        What else was called that could have been a root, one sentence each.
    """

    exit_code: int
    vm: VirtualMemory | None
    unmanaged: tuple[str, ...] = ()


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
    ValueError
        If a policy or an engine is unknown, or the two do not go together; nothing has run then.
    """
    with (
        script.as_main(path, arguments, options.module) as execute,
        _Roots(options, progress) as roots,
    ):
        code = _exit_code(execute)
    return Launched(code, roots.vm if roots.found else None, tuple(roots.unmanaged))


class _Enough(BaseException):
    """Ends the script: as many iterations have run as were asked for."""


class _Calls(threading.local):
    """Whether a module call is under way on this thread."""

    under_way = False


class _Roots:
    """Finds the roots while the script runs and gives them to one `VirtualMemory`.

    It stands in the place of `torch.nn.Module.__call__`, since a hook runs when torch has looked
    up what the module's forward is, which is too late to put another there.
    """

    def __init__(
        self, options: LaunchOptions, progress: Callable[[IterationStats], None] | None
    ) -> None:
        self.vm = VirtualMemory([], options.limits)
        self.vm.listeners.append(self._count)
        if options.recorded:
            self.vm.record()
        # Not whether ``_known`` holds any: the script's modules may be gone when it has ended.
        self.found = False
        self.unmanaged: dict[str, None] = {}
        self._known: WeakSet[torch.nn.Module] = WeakSet()
        self._options = options
        self._progress = progress
        self._iterations = 0
        self._plain_call = torch.nn.Module.__call__

    def __enter__(self) -> _Roots:
        plain_call, meet, calls = self._plain_call, self._meet, _Calls()

        @functools.wraps(plain_call)
        def call(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            # The first comes first: Dynamo knows the answer, and looks no further.
            if torch.compiler.is_compiling() or calls.under_way:
                return plain_call(module, *args, **kwargs)
            calls.under_way = True
            try:
                meet(module, args, kwargs)
                return plain_call(module, *args, **kwargs)
            finally:
                calls.under_way = False

        # Dynamo comes across it after a graph break; what follows is what it should look at.
        skip_code(call.__code__)  # type: ignore[attr-defined]
        _set_call(call)
        return self

    def __exit__(self, *_: object) -> None:
        _set_call(self._plain_call)
        self.vm.close()

    def _meet(self, module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """An outermost call begins."""
        limit = self._options.iterations
        # Of each one is told when the next has ended.
        if limit is not None and self._iterations >= limit - 1:
            raise _Enough
        if module in self._known or not _is_root(module, args, kwargs):
            return
        if is_scripted(module):
            said = f"{module.original_name} runs as plain PyTorch, as TorchScript has compiled it"
            self.unmanaged[said] = None
            return
        try:
            self.vm.add(module)
        except BeladyError:
            raise
        except ValueError as error:
            raise TraceError(str(error)) from error
        self.found = True
        self._known.add(module)

    def _count(self, stats: IterationStats) -> None:
        self._iterations += 1
        if self._progress is not None:
            self._progress(stats)


def _set_call(call: Callable[..., Any]) -> None:
    torch.nn.Module.__call__ = call  # type: ignore[method-assign]


def _is_root(module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> bool:
    if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
        return False  # the second: a checkpoint that replays its forward inside backward
    if getattr(module, "_is_replica", False):
        return False  # nn.DataParallel calls copies of a root on other threads
    if any(parameter.requires_grad for parameter in module.parameters()):
        return True
    inputs = tree_iter((args, dict(kwargs)))
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in inputs)


def _exit_code(execute: Callable[[], object]) -> int:
    """Run the script and say what python would exit with, when what it left running has ended."""
    before = threading.enumerate()
    try:
        code = _ended(execute)
        _wait(before)
    except _Enough:
        return 0
    except KeyboardInterrupt as error:
        _show(error)
        return INTERRUPTED
    return code


def _wait(before: Container[threading.Thread]) -> None:
    """Wait for the threads that python waits for before it ends; those of pools it ends itself."""
    pools: Container[threading.Thread] = getattr(futures, "_threads_queues", ())
    while left := [
        it for it in threading.enumerate() if not (it.daemon or it in before or it in pools)
    ]:
        left[0].join()


def _ended(execute: Callable[[], object]) -> int:
    try:
        execute()
    except _Enough:
        raise
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
    shown: BaseException | None = error
    seen: list[BaseException] = []  # what was raised from itself is a circle
    while shown is not None and shown not in seen:
        seen.append(shown)
        shown.__traceback__ = _of_script(shown.__traceback__)
        shown = shown.__cause__ or shown.__context__
    sys.excepthook(type(error), error, error.__traceback__)


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """Without what ran the script, and what stands in the place of its calls of modules."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    kept = [it for it in dropwhile(_runs, frames) if _module_of(it) != __name__]
    following = None
    for frame in reversed(kept):
        frame.tb_next, following = following, frame
    return following


def _runs(trace: TracebackType) -> bool:
    return _module_of(trace) in (__name__, script.__name__, "runpy")


def _module_of(trace: TracebackType) -> Any:
    return trace.tb_frame.f_globals.get("__name__")
