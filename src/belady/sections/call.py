"""One call of a stretch: its slices forward, and backward as one node of the caller's graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from belady.errors import SectionError
from belady.sections.dropout import Drawing
from belady.sections.passage import Cut, Opening, Passage, through_norm
from belady.sections.slices import Bounds, Totals, Whole
from belady.sections.stages import Stage, Step, foreign_leaf

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
    cut
        The slices.
    aliases
        What stands in the place of each trainable parameter of the stretch.
    drawing
        Random numbers of the stretch in this call.
    """

    def __init__(
        self,
        name: str,
        stages: Sequence[Stage],
        cut: tuple[Bounds, ...],
        aliases: dict[Tensor, Tensor],
        drawing: Drawing,
    ) -> None:
        self.name = name
        self._parameters = tuple(aliases)
        self._stages = stages
        self._cut = cut
        self._indices = range(len(cut))
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
        first, *others = self._stages
        opening: Opening = Cut(whole.detach(), self._cut)
        passage = Passage(first, opening, token if whole.requires_grad else None)
        self._passages.append(passage)
        for stage in others:
            assert stage.norm is not None
            opening = stage.norm.open([self._step_through(passage, at) for at in self._indices])
            needs = stage.norm.trains or any(end is not None for end, _ in passage.edges)
            passage = Passage(stage, opening, token if needs else None)
            self._passages.append(passage)
        result = Whole(self.name, self._cut)
        for index in self._indices:
            result.put(index, self._step_through(passage, index))
        assert result.tensor is not None
        return result.tensor

    def _step_through(self, passage: Passage, index: int) -> Tensor:
        begin, tensor = passage.opening.enter(index, passage.token)
        first = tensor if isinstance(passage.opening, Cut) else None
        version = tensor._version
        self._drawing.begin(index)
        with torch.enable_grad():
            for step in passage.stage.steps:
                tensor = self._tensor(step, step.call(tensor))
                if first is not None and first._version != version:
                    raise SectionError(
                        f"{self.name} cannot run in slices: {type(step.module).__name__} writes "
                        "the input of the section in place, which the caller may use"
                    )
                if first is not None and not _share(first, tensor):
                    first = None
        self._drawing.end()
        end = get_gradient_edge(tensor) if tensor.requires_grad else None
        if end is not None and not index:
            self._refuse_foreign(end, passage.token)
        passage.edges.append((end, begin))
        return tensor.detach()

    def _tensor(self, step: Step, result: object) -> Tensor:
        if not isinstance(result, Tensor):
            raise SectionError(
                f"{self.name} cannot run in slices: {type(step.module).__name__} gives "
                f"{type(result).__name__}, not one tensor"
            )
        return result

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
        whole = Whole(f"the gradient of {self.name}", self._cut)
        parts: list[Tensor | None] = [
            gradient.narrow(0, where.start, where.size) for where in self._cut
        ]
        for position in reversed(range(len(passages))):
            passage = passages[position]
            for index in self._indices:
                part = self._step_back(passage, index, parts, totals, keep)
                if position:
                    parts[index] = part
                elif part is not None:
                    whole.put(index, part)
                del part
            if passage.stage.norm is not None and passage.token is not None:
                needed = any(end is not None for end, _ in passages[position - 1].edges)
                through_norm(passage, parts, totals, keep, needed)
        return [whole.tensor, *totals.sums]

    def _step_back(
        self,
        passage: Passage,
        index: int,
        parts: list[Tensor | None],
        totals: Totals,
        keep: bool,
    ) -> Tensor | None:
        gradient, parts[index] = parts[index], None
        end, begin = passage.edges[index]
        if not keep:
            passage.edges[index] = (None, begin)
        if end is None or gradient is None:
            return None
        if not passage.stage.steps:
            return gradient
        used = passage.stage.parameters
        wanted: list[Any] = [begin] if begin is not None else []
        found = torch.autograd.grad(
            [end],
            wanted + [self._aliases[position] for position in used],
            [gradient],
            retain_graph=keep,
            allow_unused=True,
        )
        del gradient
        for position, part in zip(used, found[len(wanted) :], strict=True):
            totals.add(position, part)
        return found[0] if wanted else None


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


def _share(one: Tensor, other: Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
