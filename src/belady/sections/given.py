"""What a module in slices is called with: one tensor to cut, and what all slices share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from belady.errors import SectionError
from belady.sections.stages import Line

_LASTING = (bool, int, float, str, type(None), torch.dtype, torch.device)
_THE_BATCH = "first dimension may be the batch"
# In the place of the tensor that is cut.
_CUT = object()


@dataclass(frozen=True, slots=True)
class Shared:
    """The arguments of a call but for the tensor that is cut."""

    args: tuple[Any, ...] = (_CUT,)
    kwargs: tuple[tuple[str, Any], ...] = ()

    @property
    def nothing(self) -> bool:
        """Whether there are none."""
        # Dynamo of torch 2.11 compares no objects that it cannot name; it knows which is which.
        return len(self.args) == 1 and self.args[0] is _CUT and not self.kwargs

    def call(self, function: Callable[..., Any], part: Any) -> Any:
        """Call ``function`` with ``part`` in the place of the tensor that is cut."""
        args = (part if it is _CUT else it for it in self.args)
        kwargs = {name: part if it is _CUT else it for name, it in self.kwargs}
        return function(*args, **kwargs)

    def mapped(self, change: Callable[[Any], Any]) -> Shared:
        """The same with all items changed, also those of tuples."""

        def over(item: Any) -> Any:
            if item is _CUT:
                return item
            return tuple(map(over, item)) if type(item) is tuple else change(item)

        return Shared(
            tuple(map(over, self.args)), tuple((name, over(it)) for name, it in self.kwargs)
        )

    def onto(self, name: str, line: Line) -> Line:
        """A line whose call has these arguments as well.

        Raises
        ------
        SectionError
            If it is more than one call.
        """
        if self.nothing:
            return line
        if len(line.steps) != 1:
            raise SectionError(
                f"{name} cannot run in slices: it is taken apart at its batch norms, and called "
                "with more than one tensor"
            )
        (step,) = line.steps
        call = step.call
        return replace(line, steps=(replace(step, call=lambda part: self.call(call, part)),))


def separated(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], along: int = 0
) -> tuple[Tensor, Shared]:
    """The tensor of a call that is cut, and the rest, which every slice is given as it is.

    Cut is what is given alone, or what alone has more than one row in the dimension that is cut.
    What has samples besides (a mask for each) is not cut, so it must not be there.

    Parameters
    ----------
    along
        The dimension that is cut.

    Raises
    ------
    SectionError
        If there is no such tensor, or the slices could not share the rest.
    """
    named = list(kwargs.items())
    alone = len(args) == 1 and not kwargs
    places = [
        item
        for item in (*args, *kwargs.values())
        if isinstance(item, Tensor) and item.dim() > along and (alone or item.shape[along] != 1)
    ]
    if len(places) != 1:
        what = "token" if along else "batch"
        raise SectionError(
            f"{name} cannot run in slices: it was called with {len(places)} tensors with a {what} "
            "dimension, not one"
        )
    (whole,) = places
    if along and not whole.is_contiguous():
        raise SectionError(
            f"{name} cannot run in slices: it was called with tokens that do not lie one after "
            "another in memory"
        )
    shared = Shared(
        tuple(_CUT if it is whole else it for it in args),
        tuple((key, _CUT if it is whole else it) for key, it in named),
    )
    shared.mapped(lambda item: _refuse_unshared(name, item, along))
    return whole, shared


def _refuse_unshared(name: str, item: Any, along: int) -> None:
    if isinstance(item, Tensor):
        if item.requires_grad:
            reason = "a second tensor that needs a gradient"
        elif item.dim() > along and item.shape[along] != 1:
            which = "second dimension may be the tokens" if along else _THE_BATCH
            reason = f"a tuple with a tensor whose {which}"
        else:
            return
    elif type(item) in _LASTING:
        return
    else:
        reason = f"{type(item).__name__}, which every slice could change"
    raise SectionError(f"{name} cannot run in slices: it was called with {reason}")
