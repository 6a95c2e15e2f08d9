"""The way of all slices through one stage: how they come in, where graphs begin and end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from belady.sections.batchnorm import Normalising
from belady.sections.slices import Bounds, Totals
from belady.sections.stages import Stage


class Cut:
    """The input of a stretch, cut into slices.

    A slice that needs a gradient is a copy, so that the whole input can go when all slices are
    through, and its slices can be moved one by one. Data that need none are usually the caller's,
    who holds them anyway: of these, slices are views.
    """

    def __init__(self, whole: Tensor, cut: Sequence[Bounds]) -> None:
        self.whole: Tensor | None = whole
        self._cut = cut

    def enter(self, index: int, token: Tensor | None) -> tuple[GradientEdge | None, Tensor]:
        """Slice ``index``, and where its gradient will be asked for."""
        assert self.whole is not None
        where = self._cut[index]
        part = self.whole.narrow(0, where.start, where.size)
        if index + 1 == len(self._cut):
            self.whole = None
        if token is None:
            return None, part
        with torch.enable_grad():
            part = _Copied.apply(token, part)  # type: ignore[no-untyped-call]
        return get_gradient_edge(part), part


class _Copied(torch.autograd.Function):
    """Begins the graph of a slice, and holds nothing; autograd is never asked to go further."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, part: Tensor) -> Tensor:
        return part.clone()


Opening = Cut | Normalising


@dataclass(eq=False)
class Passage:
    """All slices on their way through one stage.

    Attributes
    ----------
    token
        What makes graphs begin with the slices; None where these need no gradient.
    edges
        For each slice where its graph ends, and where it begins: None where there is none.
    """

    stage: Stage
    opening: Opening
    token: Tensor | None
    edges: list[tuple[GradientEdge | None, GradientEdge | None]] = field(default_factory=list)

    def begins(self) -> Iterator[GradientEdge]:
        """Where the graph of each slice begins."""
        return (self.begin(index, keep=True) for index in range(len(self.edges)))

    def begin(self, index: int, keep: bool) -> GradientEdge:
        """Where the graph of a slice begins; unless ``keep``, this is the last time it is asked."""
        end, begin = self.edges[index]
        assert begin is not None
        if not keep:
            # Its node holds the slice of the input.
            self.edges[index] = (end, None)
        return begin


def through_norm(
    passage: Passage, parts: list[Tensor | None], totals: Totals, keep: bool, needed: bool
) -> None:
    """Turn gradients of what a batch norm made into those of what it was given, in place.

    ``needed``: whether anything before it asks for the latter.
    """
    opening, norm = passage.opening, passage.stage.norm
    assert isinstance(opening, Normalising)
    assert norm is not None
    if any(part is None for part in parts):
        # Nothing that comes after it depends on what it made.
        return
    sums = opening.sums(passage.begins(), parts)
    for position, total in norm.gradients(sums):
        totals.add(position, total)
    for index in range(len(parts)):
        begin = passage.begin(index, keep)
        part, parts[index] = parts[index], None
        if needed and part is not None:
            parts[index] = opening.input_gradient(begin, part, sums)
