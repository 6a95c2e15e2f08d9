"""Where generated code may take memory: ops that torch dispatches, and buffers of fused kernels."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from belady.graph.program import Program
from belady.memory.filling import Filling

# What the modules that Inductor writes call for a buffer, and where it keeps these modules.
_BUFFERS, _CACHE = ("empty_strided_cuda", "empty_strided_cpu"), "torch._inductor.codecache"


@dataclass(frozen=True)
class Listener:
    """Who is told: ``point`` is called before each.

    And ``starved`` where it has run out of memory: whether there is room now, so that it is tried
    once more. What draws from ``generator`` draws the same then.
    """

    point: Callable[[], None]
    starved: Callable[[], bool] | None = None
    generator: torch.Generator | None = None

    def act(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What ``plain`` gives."""
        self.point()
        return self.patiently(plain, *args, **kwargs)

    def patiently(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The same of what nobody is told."""
        if self.starved is None or not repeats(plain):
            return plain(*args, **kwargs)
        generator = self.generator if draws(plain) else None
        before = None if generator is None else generator.get_state()
        try:
            return plain(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            # Frames of what has failed hold memory.
            lacking = error.with_traceback(None)
        try:
            if not self.starved():
                raise lacking
        finally:
            # This frame would be in a cycle with it.
            del lacking
        if generator is not None and before is not None:
            # It may have drawn before there was no room.
            generator.set_state(before)
        return plain(*args, **kwargs)


# What writes, and would write the same again.
_COPIES = frozenset({"aten::copy_", "aten::_foreach_copy_"})
# Who is told, by thread; and what else is to be put back when nobody is any more.
_TOLD: dict[int, Listener] = {}
_BEFORE: list[tuple[dict[str, Any], str, Any]] = []
_LOCK = threading.Lock()


def repeats(plain: Any) -> bool:
    """Whether what has failed can be done again: not what may have written to what it is given.

    What it is given for its results, by Inductor's code say, may be written to twice. Batch norms
    write to running statistics, which their schemas do not say, when all is there that they take
    memory for (ATen/native/cuda/Normalization.cu, ATen/native/cudnn/BatchNorm.cpp).
    """
    schema = getattr(plain, "_schema", None)
    if schema is None or not schema.is_mutable or schema.name in _COPIES:
        return True
    of = [(it.alias_info, it.is_out) for it in schema.arguments]
    return all(out for alias, out in of if alias is not None and alias.is_write)


def draws(plain: Any) -> bool:
    """Whether it may draw random numbers: of what others wrote nobody says."""
    tags = getattr(plain, "tags", None)
    if tags is None:
        return False
    return torch.Tag.nondeterministic_seeded in tags or plain.namespace != "aten"


@contextmanager
def told_of_points(listener: Listener) -> Iterator[None]:
    """Have ``listener`` told of each of them, of this thread."""
    thread = threading.get_ident()
    with _LOCK:
        if not _TOLD:
            _tell_of_buffers()
        before = _TOLD.get(thread)
        _TOLD[thread] = listener
    try:
        with _Telling(listener):
            yield
    finally:
        with _LOCK:
            if before is None:
                del _TOLD[thread]
            else:
                _TOLD[thread] = before
            if not _TOLD:
                for module, name, plain in _BEFORE:
                    module[name] = plain
                _BEFORE.clear()


def _tell_of_buffers() -> None:
    cache = sys.modules.get(_CACHE)
    modules = [] if cache is None else [vars(it) for it in cache.PyCodeCache.modules]
    _BEFORE.extend((it, name, it[name]) for it in modules for name in _BUFFERS if name in it)
    for module, name, plain in _BEFORE:
        module[name] = _telling(plain)


def _telling(plain: Callable[..., Any]) -> Callable[..., Any]:
    def buffer(*args: Any) -> Any:
        listener = _TOLD.get(threading.get_ident())
        return plain(*args) if listener is None else listener.act(plain, *args)

    return buffer


@contextmanager
def filled(program: Program, filling: Filling | None) -> Iterator[Program]:
    """A program whose blocks lie where they are to, as it is captured."""
    if filling is None:
        yield program
        return
    try:
        with told_of_points(Listener(filling.point)):
            filling.open()
            yield program.told(filling)
    finally:
        filling.close()


class _Telling(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, listener: Listener) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._listener = listener

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._listener.act(func, *args, **(kwargs or {}))
