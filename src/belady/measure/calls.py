"""Which functions of torch a program calls while its hooks are on, and with which numbers.

A recipe holds the numbers of an op as they were when it was observed. A program can change them
(a temperature, a schedule, a branch), and neither autograd nor the geometry of what is saved shows
it. The calls do: they are seen where Python makes them, before the op runs.
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Callable, Iterable
from math import copysign
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

_get_stack: Callable[[], list[TorchFunctionMode]] = _get_current_function_mode_stack
_push = torch._C._push_on_torch_function_stack
_pop = torch._C._pop_torch_function_stack
_in_backward = torch._C._current_graph_task_id


class Call(NamedTuple):
    """One call from Python.

    Attributes
    ----------
    numbers
        Its arguments, flattened: what is no tensor by kind and value, parameters by identity. None
        where an argument is of a kind that cannot be compared.
    """

    func: Any
    numbers: list[Any] | None


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
        if self.aside or _in_backward() != -1:
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

    def enter_pass(self, pass_index: int) -> None:
        """See `Calls.enter_pass`."""
        self.passes.append([])
        super().enter_pass(pass_index)

    def begins(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `Calls.begins`."""
        calls = self.passes[-1]
        numbers = _numbers(args, kwargs)
        self.trusted = numbers is not None and (self._pass, len(calls)) not in self.varying
        calls.append(Call(func, numbers))

    def ends(self) -> None:
        """See `Calls.ends`."""
        self.trusted = False


class Follower(Calls):
    """Compares the calls of an iteration with those of one before.

    Parameters
    ----------
    passes
        What a `Learner` took down.
    expected
        The calls that it did not trust: nothing that is replayed has their numbers in it.
    varying
        Where calls are added whose numbers change, for the next observation.

    Attributes
    ----------
    strayed
        Whether the iteration under way has called something else so far.
    """

    def __init__(
        self,
        passes: list[list[Call]],
        expected: frozenset[tuple[int, int]],
        varying: set[tuple[int, int]],
    ) -> None:
        super().__init__()
        self.strayed = False
        self._passes = passes
        self._varying = varying
        self._expected = expected
        self._known: list[Call] = []
        self._next = 0

    def start_iteration(self) -> None:
        """An iteration begins."""
        self.strayed = False

    def enter_pass(self, pass_index: int) -> None:
        """See `Calls.enter_pass`."""
        self._known = self._passes[pass_index] if pass_index < len(self._passes) else []
        self._next = 0
        super().enter_pass(pass_index)

    def begins(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `Calls.begins`."""
        index = self._next
        if index < 0:
            return
        self._next = index + 1
        if index >= len(self._known) or self._known[index].func != func:
            # From here on nothing says which call is which.
            self.strayed, self._next = True, -1
        elif self._known[index].numbers not in (None, _numbers(args, kwargs)):
            name = (self._pass, index)
            self._varying.add(name)
            self.strayed |= name not in self._expected


def compiled_anything() -> bool:
    """Whether torch.compile is used in this process: called on anything, or has compiled code.

    It would trace a mode of ours into its code, and what its code calls is not seen.
    """
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is not None and frames.FRAME_COUNTER > 0:
        return True
    contexts = sys.modules.get("torch._dynamo.eval_frame")
    return contexts is not None and any(
        backend is not None for backend in contexts.cached_backends.values()
    )


def _numbers(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Any] | None:
    found: list[Any] = []
    comparable = _flatten(args, found)
    for name, arg in kwargs.items():
        found.append(name)
        comparable = _flatten((arg,), found) and comparable
    return found if comparable else None


def _flatten(items: Iterable[Any], into: list[Any]) -> bool:
    """Append what ``items`` are; whether all of them can be compared."""
    comparable = True
    for item in items:
        kind = type(item)
        into.append(kind)
        if kind is torch.Tensor:
            continue
        if kind in _PLAIN or isinstance(item, _NUMBERS):
            into.append(item)
            if item == 0 and kind is float:
                into.append(copysign(1.0, item))
        elif isinstance(item, torch.nn.Parameter):
            into.append(id(item))
        elif isinstance(item, (tuple, list)):
            into.append(len(item))
            comparable = _flatten(item, into) and comparable
        elif kind is slice:
            comparable = _flatten((item.start, item.stop, item.step), into) and comparable
        elif not isinstance(item, torch.Tensor):
            comparable = False
    return comparable


_PLAIN = frozenset(
    {
        *(int, float, bool, str, complex, type(None), type(...), type, types.FunctionType),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)
_NUMBERS = (np.generic, enum.Enum)
