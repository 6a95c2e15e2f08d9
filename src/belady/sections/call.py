"""One call of a stretch: its slices forward, and backward as one node of the caller's graph."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from belady.errors import SectionError
from belady.sections.dropout import Drawing
from belady.sections.passage import Cut, Opening, Parts, Passage, add, opened, through_norm
from belady.sections.slices import Bounds, Totals, Whole
from belady.sections.stages import Line, Stage, foreign_leaf, split
from belady.sections.tracing import Step

_TWICE = (
    "Trying to backward through the graph a second time, but the slices of {} have been let go of "
    "as the first backward went. Specify retain_graph=True if you need to backward through the "
    "graph a second time."
)
_DOUBLE = (
    "{} runs in slices, and its gradient has no graph of its own: create_graph=True (a gradient "
    "of a gradient) needs a plan without this section"
)


class SlicedCall:
    """One call of a stretch.

    Parameters
    ----------
    name
        Of the run, for messages.
    line
        What it does.
    cut
        The slices.
    aliases
        What stands in the place of each trainable parameter of the stretch.
    drawing
        Random numbers of the stretch in this call.
    along
        The dimension that is cut.
    """

    def __init__(
        self,
        name: str,
        line: Line,
        cut: tuple[Bounds, ...],
        aliases: dict[Tensor, Tensor],
        drawing: Drawing,
        along: int,
    ) -> None:
        self.name = name
        self._parameters = tuple(aliases)
        self._stages = split(line, {alias: at for at, alias in enumerate(aliases.values())})
        self._result = line.result
        # Values that have the bytes of the input.
        self._given = {0}
        self._cut = cut
        self._along = along
        self._aliases = list(aliases.values())
        self._drawing = drawing
        self._passages: list[Passage] | None = []

    def run(self, whole: Tensor) -> Tensor:
        """Run forward; the result belongs to the caller's graph."""
        result: Tensor = _InSlices.apply(self, whole, *self._parameters)  # type: ignore[no-untyped-call]
        return result

    # -- forward -----------------------------------------------------------------------------

    def forward(self, whole: Tensor) -> Tensor:
        """Take all slices through one stage after another."""
        assert self._passages is not None
        token = torch.empty(0, requires_grad=True)
        needs = {0} if whole.requires_grad else set()
        held: list[Parts] = [{} for _ in self._cut]
        result = Whole(self.name, self._cut, self._along)
        for stage in self._stages:
            opening: Opening
            if stage.norm is None:
                opening = Cut(whole.detach(), self._cut, self._along)
            else:
                opening = opened(stage.norm, stage, held)
                if stage.norm.trains or stage.given in needs:
                    needs.add(stage.enters)
            needed = needs.intersection((stage.enters, *stage.takes))
            passage = Passage(stage, opening, token if needed else None, needs)
            self._passages.append(passage)
            for index, parts in enumerate(held):
                self._step_through(passage, index, parts)
                if self._result in parts and stage is self._stages[-1]:
                    result.put(index, parts.pop(self._result))
        self._let_go(self._passages)
        assert result.tensor is not None
        return result.tensor

    def _let_go(self, passages: list[Passage]) -> None:
        """Steps hold what slices share: the caller may let go of it before backward."""
        self._stages = []
        for passage in passages:
            passage.stage = replace(passage.stage, steps=())

    def _step_through(self, passage: Passage, index: int, held: Parts) -> None:
        stage = passage.stage
        parts: dict[int, Any] = {**passage.enter(index, held)}
        foreign = self._foreign(stage, parts, held)
        self._drawing.begin(index)
        with torch.enable_grad():
            for step, drops in zip(stage.steps, stage.drops, strict=True):
                given = [parts[value] for value in step.reads]
                for value in drops:
                    parts.pop(value, None)
                result = self._called(step, given, foreign)
                if step.makes not in drops:
                    parts[step.makes] = result
                del given, result
        self._drawing.end()
        for value in stage.gives:
            if not isinstance(parts[value], Tensor):
                self._refuse(f"{type(parts[value]).__name__} crosses a batch norm")
        ends = passage.leave(parts, held)
        if not index:
            for end in ends.values():
                self._refuse_foreign(end, passage.token)

    def _foreign(self, stage: Stage, parts: Parts, held: Parts) -> set[int]:
        """What a step must not write: others have it too, and their graphs would not know."""
        known = Counter(map(_bytes_of, {**held, **parts}.values()))
        shared = {
            value
            for value, part in parts.items()
            if value in stage.lasts or known[_bytes_of(part)] > 1
        }
        return shared | self._given

    def _called(self, step: Step, given: list[Any], foreign: set[int]) -> Any:
        """Do a step, unless it writes what is foreign."""
        before = [
            (part, part._version)
            for value, part in zip(step.reads, given, strict=True)
            if value in foreign
        ]
        result = step.call(*given)
        if any(part._version != version for part, version in before):
            self._refuse(
                f"{step.name} writes the input of the section in place, which the caller may use, "
                "or what comes from before a batch norm and is read again"
            )
        if isinstance(result, Tensor):
            for value, part in zip(step.reads, given, strict=True):
                if value in foreign and _bytes_of(part) == _bytes_of(result):
                    foreign.add(step.makes)
                    if value in self._given:
                        self._given.add(step.makes)
        elif step.module is not None:
            self._refuse(f"{step.name} gives {type(result).__name__}, not one tensor")
        return result

    def _refuse(self, reason: str) -> NoReturn:
        raise SectionError(f"{self.name} cannot run in slices: {reason}")

    def _refuse_foreign(self, end: GradientEdge, token: Tensor | None) -> None:
        known = {id(alias) for alias in self._aliases} | {id(token)}
        leaf = foreign_leaf(end, known)
        if leaf is not None:
            raise SectionError(
                f"{self.name} cannot run in slices: it uses a tensor of shape {tuple(leaf.shape)} "
                "that needs a gradient and is no parameter of its modules"
            )

    # -- backward ----------------------------------------------------------------------------

    def backward(self, gradient: Tensor, keep: bool) -> list[Tensor | None]:
        """Gradients of the input and of each parameter; ``keep``: there may be another backward."""
        passages = self._passages
        if passages is None:
            raise RuntimeError(_TWICE.format(self.name))
        if not keep:
            self._passages = None
        totals = Totals(len(self._aliases))
        whole = Whole(f"the gradient of {self.name}", self._cut, self._along)
        gradients: list[Parts] = [
            {self._result: gradient.narrow(self._along, where.start, where.size)}
            for where in self._cut
        ]
        for passage in reversed(passages):
            stage = passage.stage
            for index, parts in enumerate(gradients):
                self._step_back(passage, index, parts, totals, keep)
                if stage.norm is None and stage.enters in parts:
                    whole.put(index, parts.pop(stage.enters))
            if stage.norm is not None and stage.enters in passage.needs:
                through_norm(passage, gradients, totals, keep)
        return [whole.tensor, *totals.sums]

    def _step_back(
        self, passage: Passage, index: int, gradients: Parts, totals: Totals, keep: bool
    ) -> None:
        ends = passage.ends[index]
        if not keep:
            passage.ends[index] = {}
        asked = [value for value in ends if value in gradients]
        if not asked:
            return
        used = passage.stage.parameters
        begins = passage.begins[index]
        wanted: list[Any] = [*begins.values()]
        wanted += [self._aliases[position] for position in used]
        found = torch.autograd.grad(
            [ends[value] for value in asked],
            wanted,
            [self._together(gradients.pop(value)) for value in asked],
            retain_graph=keep,
            allow_unused=True,
        )
        for position, part in zip(used, found[len(begins) :], strict=True):
            totals.add(position, part)
        for value, part in zip(begins, found, strict=False):
            if part is not None:
                add(gradients, value, part)

    def _together(self, gradient: Tensor) -> Tensor:
        """A gradient of a slice, as dense as that of the whole: tokens of samples lie apart."""
        return gradient.contiguous() if self._along else gradient


class _InSlices(torch.autograd.Function):
    """A call of a stretch as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, call: SlicedCall, whole: Tensor, *parameters: Tensor) -> Tensor:
        ctx.call = call
        return call.forward(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        call: SlicedCall = ctx.call
        if torch.is_grad_enabled():
            raise SectionError(_DOUBLE.format(call.name))
        keep: bool = torch._C._autograd._get_current_graph_task_keep_graph()
        return None, *call.backward(gradient, keep)


def _bytes_of(part: Tensor) -> int:
    return int(part.untyped_storage()._cdata)
