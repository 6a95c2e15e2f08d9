"""Cutting a batch, or the tokens of each sample, into slices, and putting slices together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from belady.errors import SectionError
from belady.memory.geometry import dense

_THE_BATCH = ("samples", "first dimension is not the batch")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where a slice begins, and how many samples (tokens) it has."""

    start: int
    size: int


def bounds(samples: int, slices: int) -> tuple[Bounds, ...]:
    """Cut ``samples`` samples into ``slices`` slices; the first ones have one sample more."""
    size, larger = divmod(samples, slices)
    return tuple(
        Bounds(index * size + min(index, larger), size + (index < larger))
        for index in range(slices)
    )


class Whole:
    """A tensor of all samples that is filled slice by slice.

    Its bytes are taken when the first slice is there, laid out as that one is.

    Parameters
    ----------
    name
        Of the modules that make it, for messages.
    along
        The dimension that is cut.
    """

    def __init__(self, name: str, cut: tuple[Bounds, ...], along: int) -> None:
        self.tensor: Tensor | None = None
        self._name = name
        self._cut = cut
        self._along = along

    def put(self, index: int, part: Tensor) -> None:
        """Write slice ``index``.

        Raises
        ------
        SectionError
            If it has another number of samples than it should, or another shape than the first.
        """
        where, along = self._cut[index], self._along
        if part.dim() <= along or part.shape[along] != where.size:
            unit, is_not = ("tokens", "second dimension is not theirs") if along else _THE_BATCH
            raise SectionError(
                f"{self._name} made a tensor of shape {tuple(part.shape)} of {where.size} {unit}: "
                f"its {is_not}, so it cannot run in slices"
            )
        if self.tensor is None:
            self.tensor = empty_like(part, self._cut[-1].start + self._cut[-1].size, along)
        others, own = (beside(it, along) for it in (self.tensor, part))
        if own != others or part.dtype != self.tensor.dtype:
            unit = "token" if along else "sample"
            raise SectionError(
                f"{self._name} made slices of {others} and of {own} a {unit}, so it cannot run in "
                "slices"
            )
        self.tensor.narrow(along, where.start, where.size).copy_(part)


class Totals:
    """Sums of gradients, in the order in which they are added."""

    def __init__(self, count: int) -> None:
        self.sums: list[Tensor | None] = [None] * count
        self._owned = [False] * count

    def add(self, position: int, part: Tensor | None) -> None:
        """Add ``part`` to sum ``position``."""
        if part is None:
            return
        total = self.sums[position]
        if total is None:
            # Autograd may have given the same tensor for something else as well: not to be written.
            self.sums[position] = part
        elif self._owned[position]:
            total += part
        else:
            self.sums[position] = total + part
            self._owned[position] = True


def beside(part: Tensor, along: int) -> tuple[int, ...]:
    """Sizes of all dimensions but the one that is cut."""
    return (*part.shape[:along], *part.shape[along + 1 :])


def elements_apart(part: Tensor) -> int | None:
    """Elements from one sample to the next where each is dense; None where it is not."""
    strides = part.stride()
    elements = 1
    for dim in sorted(range(1, part.dim()), key=strides.__getitem__):
        if part.shape[dim] != 1:
            if strides[dim] != elements:
                return None
            elements *= part.shape[dim]
    return elements


def empty_like(part: Tensor, samples: int, along: int) -> Tensor:
    """An empty tensor of so many samples, each laid out as those of ``part`` if that is dense.

    Of so many tokens, without gaps and in the order of the strides of ``part``.
    """
    if along:
        whole = (*part.shape[:along], samples, *part.shape[along + 1 :])
        strides = dense(whole, part.stride())
        return torch.empty_strided(whole, strides, dtype=part.dtype, device=part.device)
    shape = (samples, *part.shape[1:])
    apart = elements_apart(part)
    if apart is None:
        return part.new_empty(shape)
    layout = (apart, *part.stride()[1:])
    return torch.empty_strided(shape, layout, dtype=part.dtype, device=part.device)
