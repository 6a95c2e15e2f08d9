"""Which functions of torch a program calls while its hooks are on, and with which numbers.

A recipe holds the numbers of an op as they were when it was observed. A program can change them
(a temperature, a schedule, a branch), and neither autograd nor the geometry of what is saved shows
it. The calls do: they are seen where Python makes them, before the op runs.
"""

from __future__ import annotations

import enum
import sys
import types
import weakref
from collections.abc import Callable, Iterable
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
    alike
        What the arguments of a call with the same numbers usually are, see `_alike`: most pass the
        very same objects every time, and to see that is several times as fast as to flatten them.
    """

    func: Any
    numbers: list[Any] | None
    alike: tuple[Any, ...] | None


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
        calls.append(Call(func, numbers, _alike(args, kwargs)))

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
        known = self._known[index] if index < len(self._known) else None
        if known is None or known.func != func:
            # From here on nothing says which call is which.
            self.strayed, self._next = True, -1
        elif _is_alike(known.alike, args, kwargs):
            return
        elif known.numbers not in (None, _numbers(args, kwargs)):
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


def _alike(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Objects that cannot change, `torch.Tensor` for a tensor, a weak reference for a parameter.

    None where an argument is anything else.
    """
    found: list[Any] = []
    for item in (*args, *kwargs, *kwargs.values()):
        if type(item) is torch.Tensor:
            found.append(torch.Tensor)
        elif isinstance(item, torch.nn.Parameter):
            found.append(weakref.ref(item))
        elif _lasting(item):
            found.append(item)
        else:
            return None
    return tuple(found)


def _lasting(item: Any) -> bool:
    if type(item) is tuple:
        return all(map(_lasting, item))
    return type(item) in _LASTING


def _is_alike(alike: tuple[Any, ...] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call certainly has the numbers of the one that ``alike`` was made of."""
    given = (*args, *kwargs, *kwargs.values()) if kwargs else args
    if alike is None or len(given) != len(alike):
        return False
    for item, known in zip(given, alike, strict=True):
        if item is known or type(item) is known:
            continue
        if item is None or type(known) is not weakref.ReferenceType or known() is not item:
            return False
    return True


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
            if isinstance(item, _WITH_SIGN):
                into.append(repr(item))  # 0 equals -0
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


_LASTING = frozenset(
    {
        *(int, float, bool, str, complex, type(None), type(...)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)
_PLAIN = _LASTING | {type, types.FunctionType}
_NUMBERS = (np.generic, enum.Enum)
_WITH_SIGN = (float, complex, np.inexact)
