"""The way of all slices through one stage: how they come in, where graphs begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from belady.sections.batchnorm import BatchNorm, Normalising
from belady.sections.slices import Bounds, Totals
from belady.sections.stages import Stage


class Cut:
    """The input of a stretch, cut into slices.

    A slice that needs a gradient is a copy, so that the whole input can go when all slices are
    through, and its slices can be moved one by one. Data that need none are usually the caller's,
    who holds them anyway: of these, slices along the batch are views. Slices along the tokens are
    copies: their samples lie apart in the whole, and some ops want none of that.
    """

    def __init__(self, whole: Tensor, cut: Sequence[Bounds], along: int) -> None:
        self.whole: Tensor | None = whole
        self._cut = cut
        self._along = along

    def enter(self, index: int, token: Tensor | None) -> tuple[GradientEdge | None, Tensor]:
        """Slice ``index``, and where its gradient will be asked for."""
        assert self.whole is not None
        where = self._cut[index]
        part = self.whole.narrow(self._along, where.start, where.size)
        if index + 1 == len(self._cut):
            self.whole = None
        layout = torch.contiguous_format if self._along else torch.preserve_format
        if token is None:
            return None, part.clone(memory_format=layout) if self._along else part
        with torch.enable_grad():
            part = _Copied.apply(token, part, layout)  # type: ignore[no-untyped-call]
        return get_gradient_edge(part), part


class _Copied(torch.autograd.Function):
    """Begins the graph of a slice, and holds nothing; autograd is never asked to go further."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, part: Tensor, layout: torch.memory_format) -> Tensor:
        return part.clone(memory_format=layout)


class _Carried(torch.autograd.Function):
    """Begins another graph with what an earlier stage has made, and holds nothing."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, part: Tensor) -> Tensor:
        return part.detach()


def carried(part: Tensor, token: Tensor | None) -> tuple[GradientEdge | None, Tensor]:
    """What an earlier stage has, for this one, and where its gradient will be asked for."""
    if token is None:
        return None, part
    with torch.enable_grad():
        part = _Carried.apply(token, part)  # type: ignore[no-untyped-call]
    return get_gradient_edge(part), part


Opening = Cut | Normalising
# By the number of a value.
Edges = dict[int, GradientEdge]
Parts = dict[int, Tensor]


@dataclass(eq=False)
class Passage:
    """All slices on their way through one stage.

    Attributes
    ----------
    token
        What makes graphs begin with the slices; None where these need no gradient.
    needs
        Values that need a gradient; those that the stage gives are added.
    ends, begins
        For each slice where its graph ends, and where it begins.
    """

    stage: Stage
    opening: Opening
    token: Tensor | None
    needs: set[int]
    ends: list[Edges] = field(default_factory=list)
    begins: list[Edges] = field(default_factory=list)

    def enter(self, index: int, held: Parts) -> Parts:
        """What the steps of slice ``index`` may read; ``held`` is what it has from before."""
        stage, begins = self.stage, Edges()
        parts = Parts()
        edge, parts[stage.enters] = self.opening.enter(index, self._token(stage.enters))
        if edge is not None:
            begins[stage.enters] = edge
        if stage.enters in stage.lasts:
            held[stage.enters] = parts[stage.enters].detach()
        for value in stage.takes:
            part = held[value] if value in stage.lasts else held.pop(value)
            if value in stage.copies and (value or self._token(value) is not None):
                # What two stages save would come back for the first and stay for the second.
                part = part.clone()
            edge, parts[value] = carried(part, self._token(value))
            if edge is not None:
                begins[value] = edge
        self.begins.append(begins)
        return parts

    def _token(self, value: int) -> Tensor | None:
        return self.token if value in self.needs else None

    def leave(self, parts: dict[int, Any], held: Parts) -> Edges:
        """Take what later stages need from ``parts``; gives where its graphs end."""
        ends = Edges()
        for value in self.stage.gives:
            part = parts.pop(value)
            if part.requires_grad:
                ends[value] = get_gradient_edge(part)
            held[value] = part.detach()
        self.needs.update(ends)
        self.ends.append(ends)
        return ends


def opened(norm: BatchNorm, stage: Stage, held: Sequence[Parts]) -> Normalising:
    """Begin ``stage``, whose norm it is, with the statistics of all slices."""
    later = stage.lasts.union(stage.takes)
    parts = [
        slice_[stage.given] if stage.given in later else slice_.pop(stage.given) for slice_ in held
    ]
    return norm.open([*parts])


def add(gradients: Parts, value: int, part: Tensor) -> None:
    """Add to the gradient of a value."""
    total = gradients.get(value)
    # Autograd may have given the same tensor for something else as well: not to be written.
    gradients[value] = part if total is None else total + part


def through_norm(passage: Passage, gradients: Sequence[Parts], totals: Totals, keep: bool) -> None:
    """Turn gradients of what a batch norm made into those of what it was given.

    Parameters
    ----------
    gradients
        Of each slice.
    keep
        Whether there may be another backward.
    """
    opening, stage = passage.opening, passage.stage
    assert isinstance(opening, Normalising)
    assert stage.norm is not None
    parts = [slice_.pop(stage.enters, None) for slice_ in gradients]
    if any(part is None for part in parts):
        # Nothing that comes after it depends on what it made.
        return
    sums = opening.sums((begins[stage.enters] for begins in passage.begins), parts)
    for position, total in stage.norm.gradients(sums):
        totals.add(position, total)
    for index, begins in enumerate(passage.begins):
        # Its node holds the slice of the input.
        begin = begins[stage.enters] if keep else begins.pop(stage.enters)
        part, parts[index] = parts[index], None
        if stage.given in passage.needs and part is not None:
            add(gradients[index], stage.given, opening.input_gradient(begin, part, sums))
