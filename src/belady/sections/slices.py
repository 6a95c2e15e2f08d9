"""Cutting a batch into slices, and putting slices together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from belady.errors import SectionError


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where a slice of the batch begins, and how many samples it has."""

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
    """

    def __init__(self, name: str, cut: tuple[Bounds, ...]) -> None:
        self.tensor: Tensor | None = None
        self._name = name
        self._cut = cut

    def put(self, index: int, part: Tensor) -> None:
        """Write slice ``index``.

        Raises
        ------
        SectionError
            If it has another number of samples than it should, or another shape than the first.
        """
        where = self._cut[index]
        if not part.dim() or part.shape[0] != where.size:
            raise SectionError(
                f"{self._name} made a tensor of shape {tuple(part.shape)} of {where.size} samples: "
                "its first dimension is not the batch, so it cannot run in slices"
            )
        if self.tensor is None:
            self.tensor = empty_like(part, self._cut[-1].start + self._cut[-1].size)
        elif part.shape[1:] != self.tensor.shape[1:] or part.dtype != self.tensor.dtype:
            raise SectionError(
                f"{self._name} made slices of {tuple(self.tensor.shape[1:])} and of "
                f"{tuple(part.shape[1:])} a sample, so it cannot run in slices"
            )
        self.tensor.narrow(0, where.start, where.size).copy_(part)


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


def empty_like(part: Tensor, samples: int) -> Tensor:
    """An empty tensor of so many samples, each laid out as those of ``part`` if that is dense."""
    shape = (samples, *part.shape[1:])
    apart = elements_apart(part)
    if apart is None:
        return part.new_empty(shape)
    layout = (apart, *part.stride()[1:])
    return torch.empty_strided(shape, layout, dtype=part.dtype, device=part.device)
