"""Dropout in slices inside of a captured graph: its random numbers are those of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from belady.errors import SectionError
from belady.forwards import Forward, run_plain
from belady.sections.dropout import drawn
from belady.sections.slices import Bounds, elements_apart, empty_like


class Drawn(Forward):
    """Stands on an `nn.Dropout` while modules around it are captured in slices.

    The first slice that comes to it draws for all; see `belady.sections.dropout`. Dynamo follows
    what it notes of itself meanwhile.
    """

    def __init__(self, owner: nn.Module) -> None:
        super().__init__(owner)
        self._cut: Sequence[Bounds] = ()
        self._index = self._calls = 0
        self._drawn: list[Tensor] = []

    def enter(self, cut: Sequence[Bounds], index: int) -> None:
        """Slice ``index`` begins with what follows."""
        self._cut, self._index, self._calls = cut, index, 0
        if not index:
            self._drawn = []

    def leave(self) -> None:
        """All slices are through."""
        self._cut, self._drawn = (), []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        owner: Any = self.alive()
        if not self._cut or not (owner.training and 0 < owner.p < 1):
            return run_plain(owner, *args, **kwargs)
        (part,) = (*args, *kwargs.values())
        where, last = self._cut[self._index], self._cut[-1]
        if part.shape[0] != where.size or part.stride(0) != elements_apart(part):
            raise SectionError("a Dropout is given samples that do not lie dense in slices")
        if not self._index:
            self._drawn.append(_for_all(part, last.start + last.size, owner.p))
        found = self._drawn[self._calls].narrow(0, where.start, where.size)
        self._calls += 1
        if found.dtype is torch.bool:
            return part * found * (1 / (1 - owner.p))
        return part * (found / (1 - owner.p))


def _for_all(part: Tensor, samples: int, p: float) -> Tensor:
    """What a dropout draws for ``samples`` samples, of which ``part`` is a slice.

    A graph has no ops in place: of one that only gives a shape there are no bytes on a CPU, and
    factors are made slice by slice. It draws along the bytes of its result, as a dropout does, so
    its dimensions are in the order of those of a sample.
    """
    if part.device.type == "cpu":
        dims = sorted(range(1, part.dim()), key=part.stride, reverse=True)
        shape = part.new_empty(()).expand(samples, *(part.shape[dim] for dim in dims))
        numbers: Tensor = torch.ops.aten.bernoulli.p(shape, 1 - p)
        return numbers.permute(0, *(1 + dims.index(dim) for dim in range(1, part.dim())))
    return drawn(empty_like(part, samples, 0), p)
