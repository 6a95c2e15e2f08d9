"""Which functions of torch a program calls while its hooks are on, and with which numbers.

A recipe holds the numbers of an op as they were when it was observed. A program can change them
(a temperature, a schedule, a branch), and neither autograd nor the geometry of what is saved shows
it. The calls do: they are seen where Python makes them, before the op runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from belady.measure.arguments import alike_of, numbers_of

_get_stack: Callable[[], list[TorchFunctionMode]] = _get_current_function_mode_stack
_push = torch._C._push_on_torch_function_stack
_pop = torch._C._pop_torch_function_stack
in_backward = torch._C._current_graph_task_id


class Call(NamedTuple):
    """One call from Python.

    Attributes
    ----------
    numbers
        Its arguments, flattened: what is no tensor by kind and value, parameters by identity. None
        where an argument is of a kind that cannot be compared.
    alike
        What the arguments of a call with the same numbers usually are, see `alike_of`: most pass
        the very same objects every time, or equal integers, and to see that is several times as
        fast as to flatten them.
    saves
        What autograd saved meanwhile: the first ordinal of the pass, and one past the last.
    """

    func: Any
    numbers: list[Any] | None
    alike: tuple[Any, ...] | None
    saves: tuple[int, int] = (0, 0)


class Calls(TorchFunctionMode):
    """A mode on the thread of a pass. The outermost calls are seen, and none of backward's.

    Attributes
    ----------
    aside
        Above zero while belady's own work runs, whose calls do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.aside = 0
        self._pass = 0

    def enter_pass(self, pass_index: int) -> None:
        """Begin to watch this thread in pass ``pass_index``."""
        self._pass = pass_index
        _push(self)

    def leave_pass(self) -> None:
        """Stop watching, whatever modes lie above. Idempotent."""
        stack = _get_stack()
        if not any(mode is self for mode in stack):
            return
        above = []
        while (top := _pop()) is not self:
            above.append(top)
        for mode in reversed(above):
            _push(mode)

    def around(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """``pack`` as belady's own work: an autograd function saves outside of any call."""

        def pack_aside(tensor: torch.Tensor) -> Any:
            self.aside += 1
            try:
                return pack(tensor)
            finally:
                self.aside -= 1

        return pack_aside

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.aside or in_backward() != -1:
            return func(*args, **kwargs)
        self.begins(func, args, kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            self.ends()

    def begins(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call is about to be made."""

    def ends(self) -> None:
        """The call returned or raised."""


class Learner(Calls):
    """Takes down the calls of one iteration.

    Parameters
    ----------
    varying
        (pass, number of the call in it) of calls whose numbers are known to change.

    Attributes
    ----------
    passes
        The calls of each pass, in order.
    trusted
        Whether a call is under way whose numbers are not known to change.
    """

    def __init__(self, varying: Iterable[tuple[int, int]] = ()) -> None:
        super().__init__()
        self.passes: list[list[Call]] = []
        self.trusted = False
        self.varying = frozenset(varying)
        self._saves = self._first = 0

    def enter_pass(self, pass_index: int) -> None:
        """See `Calls.enter_pass`."""
        self.passes.append([])
        self._saves = 0
        super().enter_pass(pass_index)

    def around(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """See `Calls.around`; saves are counted."""
        aside = super().around(pack)

        def pack_and_count(tensor: torch.Tensor) -> Any:
            self._saves += 1
            return aside(tensor)

        return pack_and_count

    def begins(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `Calls.begins`."""
        calls = self.passes[-1]
        numbers = numbers_of(args, kwargs)
        self.trusted = numbers is not None and (self._pass, len(calls)) not in self.varying
        calls.append(Call(func, numbers, alike_of(args, kwargs)))
        self._first = self._saves

    def ends(self) -> None:
        """See `Calls.ends`."""
        calls = self.passes[-1]
        calls[-1] = calls[-1]._replace(saves=(self._first, self._saves))
        self.trusted = False


def compiled_anything() -> bool:
    """Whether torch.compile is used in this process: called on anything, or has compiled code.

    It would trace a mode of ours into its code, and what its code calls is not seen. What engines
    have had captured that are closed does not count.
    """
    frames = frames_compiled()
    if frames < _Ended.frames:
        # Torch was reset, and counts from zero again.
        _Ended.frames = 0
    if frames > _Ended.frames:
        return True
    contexts = sys.modules.get("torch._dynamo.eval_frame")
    return contexts is not None and any(
        backend is not None and not _is_ours(backend)
        for backend in contexts.cached_backends.values()
    )


def frames_compiled() -> int:
    """How often torch.compile has compiled a frame, as far as torch counts."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return 0 if frames is None else int(frames.FRAME_COUNTER)


class Frames:
    """Counts frames that are compiled for an engine; once it is closed nothing of them runs."""

    def __init__(self) -> None:
        self._count = self._depth = 0
        self._closed = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        """What is compiled in the block is."""
        before, self._depth = frames_compiled(), self._depth + 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._add(frames_compiled() - before)

    def close(self) -> None:
        """The engine is closed. Idempotent."""
        self._closed = True
        self._add(0)

    def _add(self, frames: int) -> None:
        self._count += frames
        if self._closed:
            _Ended.frames += self._count
            self._count = 0


class _Ended:
    frames = 0


def _is_ours(backend: Any) -> bool:
    # Torch holds every backend for good, in a wrapper.
    function = getattr(backend, "compiler_fn", backend)
    return str(getattr(function, "__module__", "")).startswith("belady.")


def inside_compiled() -> bool:
    """Whether what is called in this thread, by what torch.compile is not to see, is compiled code.

    At its end that sets back which modes there were: none may end inside.
    """
    frame: FrameType | None = sys._getframe()
    found = 0
    while frame is not None:
        found += frame.f_globals.get("__name__") == "torch._dynamo.eval_frame"
        frame = frame.f_back
    # One keeps the compiler from seeing the caller.
    return found > 1
