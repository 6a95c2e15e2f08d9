"""Runs modules in slices where a single op is over the budget, before anything has run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import nn

from belady.eager.asked import WITH_TENSOR_CORES, workspace_share
from belady.eager.inputs import Input, noting_inputs
from belady.errors import SectionError, TraceError
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Budget, Section
from belady.ir.trace import StorageKind, Trace
from belady.measure.batch import static_trace_with_batch
from belady.measure.stages import Policy
from belady.planners.sectioning import (
    largest_share,
    over_budget,
    sections_for,
    with_workspaces,
)
from belady.planners.workspace import leaner
from belady.sections.allowed import reasons
from belady.sections.stages import is_sequential
from belady.sections.trial import trial
from belady.sections.wrap import wrap

# What cuts modules by itself (tvDNN's "memory-object sectioning"); the others do as they are told.
POLICIES = frozenset({"auto", "tvdnn_ilp", "tvdnn_greedy"})
# Copies of the parameters that an optimizer may keep, most first: Adam's two, momentum, or none.
_COPIES = (2, 1, 0)
# Parts of the budget that the floor in slices is to fit in, tried in turn: what a plan keeps beside
# it saves more time than a few more slices cost.
_ROOM = (0.85, 1.0)
# Slices in a trial at most: their samples are run as a whole too, where memory is scarce.
_TRIED = 8
# Part of the parameters' bytes that an optimizer may keep beside whole copies, or lack.
_BESIDE = 0.02
# How often modules are cut anew where the iteration that was observed needs more than its static
# trace said, and for how much less each time than what would have done.
_ANEW, _LESS = 2, 0.98

Call = tuple[Any, Any]


class _Seen(NamedTuple):
    """Most workspace of a convolution, of its largest operand, and copies of the parameters."""

    share: float
    copies: int


class Cutting:
    """The sections in force."""

    def __init__(self, policy: Policy, hardware: HardwareProfile) -> None:
        self._policy = policy
        self._hardware = hardware
        self._undo: dict[nn.Module, Callable[[], None]] = {}
        self._said: dict[nn.Module, list[str]] = {}
        self._anew = 0
        self._allowed = 1.0
        # Copies of the parameters that sections allow for: tried in turn, and those in force.
        self._copies: tuple[int, ...] = _COPIES
        # What was observed of modules that were not cut: workspace, and whole copies kept.
        self._seen = _Seen(0.0, 0)
        self._allow_for: dict[nn.Module, int] = {}

    @property
    def said(self) -> list[str]:
        """What a user should know of the sections in force, or last in force, one sentence each."""
        return [sentence for sentences in self._said.values() for sentence in sentences]

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._undo

    def cut(self, module: nn.Module, call: Call, device: torch.device) -> bool:
        """Run modules of ``module`` in slices so that a call can fit; False if none will do.

        Each section is tried on random numbers first, on the real modules, in a few samples.
        """
        share = max(workspace_share(module, call, device), self._seen.share)
        beside = dict.fromkeys((share, 0.0))
        return self._may_cut(module) and any(
            self._cut(module, call, device, copies, share)
            for share in beside
            for copies in self._copies
        )

    def make_room(self, module: nn.Module, call: Call, device: torch.device, trace: Trace) -> None:
        """Cut modules whose ops would fit, but not beside the workspaces of a library.

        Parameters
        ----------
        trace
            Static, of this call.
        """
        # Without tensor cores an algorithm with no workspace costs little: slices could cost more.
        share = min(workspace_share(module, call, device), WITH_TENSOR_CORES)
        share, copies = max(share, self._seen.share), self._seen.copies
        if not share or not self._may_cut(module):
            return
        if self._seen.share or self._over(with_workspaces(trace, share)) > 0:
            self._cut(module, call, device, copies, share)

    def _may_cut(self, module: nn.Module) -> bool:
        policy = self._policy
        return not policy.exact and policy.name in POLICIES and module not in self._undo

    def _cut(
        self, module: nn.Module, call: Call, device: torch.device, copies: int, share: float
    ) -> bool:
        sections = self._chosen(module, call, device, copies, share)
        if not sections:
            return False
        self._undo[module] = wrap(module, sections)
        self._allow_for[module] = copies
        self._said[module] = [_sentence(section) for section in sections]
        return True

    def too_coarse(self, module: nn.Module, trace: Trace) -> bool:
        """Undo the sections of ``module`` if they do not do; then it is cut finer when admitted.

        So is what was not cut, where the least of workspaces are what does not fit.

        Parameters
        ----------
        trace
            As observed, with the workspaces and the optimizer's state that there are.
        """
        if self._anew == _ANEW or self._policy.exact:
            return False
        if module not in self._undo:
            if not self._may_cut(module) or not self._is_over_by_workspaces(trace):
                return False
            trained, state = _kept(module, trace)
            self._seen = _Seen(largest_share(trace), ceil(state / trained) if trained else 0)
            self._anew += 1
            return True
        over = self._over(trace)
        if over <= 0:
            return False
        self._anew += 1
        budget = self._policy.budget.device_bytes
        self._allowed *= _LESS * budget / (budget + over)
        self._take_back(module)
        return True

    def _over(self, trace: Trace) -> int:
        return over_budget(trace, self._hardware, self._policy.budget)

    def _is_over_by_workspaces(self, trace: Trace) -> bool:
        """Whether no plan fits, and all would but for workspaces."""
        if not any(op.workspace_bytes for op in trace.ops) or self._over(leaner(trace)[0]) <= 0:
            return False
        ops = (replace(op, workspace_bytes=0, algorithms=()) for op in trace.ops)
        return self._over(replace(trace, ops=tuple(ops))) <= 0

    def too_fine(self, module: nn.Module, trace: Trace) -> bool:
        """Undo the sections of ``module`` if they allow for more optimizer state than there is.

        Then `cut` cuts coarser. An optimizer that has begun keeps what it will: until each
        parameter has its copy, more may come.

        Parameters
        ----------
        trace
            As observed, with the optimizer's state that there is.
        """
        trained, state = _kept(module, trace)
        copies = round(state / trained) if trained else 0
        if not 0 < copies < self._allow_for.get(module, 0):
            return False
        if abs(state - copies * trained) > _BESIDE * trained:
            return False
        self._copies = (copies,)
        self._take_back(module)
        return True

    def _take_back(self, module: nn.Module) -> None:
        self._undo.pop(module)()
        del self._said[module], self._allow_for[module]

    def _within(self, room: float) -> Budget:
        """That part of the budget."""
        budget = self._policy.budget
        return replace(budget, device_bytes=int(room * budget.device_bytes))

    def close(self) -> None:
        """Let all modules run as they did."""
        while self._undo:
            self._undo.popitem()[1]()
        self._allow_for.clear()

    def _chosen(
        self, module: nn.Module, call: Call, device: torch.device, copies: int, share: float
    ) -> tuple[Section, ...] | None:
        inputs: dict[nn.Module, Input] = {}
        try:
            with noting_inputs(module, inputs):
                trace = static_trace_with_batch(module, call, device, copies)
        except TraceError:
            return None

        tried: dict[tuple[str, ...], bool] = {}

        def may(section: Section) -> bool:
            if section.modules not in tried:
                tried[section.modules] = _may(module, section, trace, inputs, device)
            return tried[section.modules]

        asking = with_workspaces(trace, share)
        for room in dict.fromkeys((*(room * self._allowed for room in _ROOM), _ROOM[-1])):
            within = self._within(room)
            found = sections_for(asking, self._hardware, within, chains(module), may)
            if found:
                return found
        return None


def _kept(module: nn.Module, trace: Trace) -> tuple[int, int]:
    """Bytes that are trained, and bytes of an optimizer's state."""
    trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    return trained, sum(it.nbytes for it in trace.storages if it.kind is StorageKind.STATE)


def chains(model: nn.Module) -> list[tuple[str, ...]]:
    """Paths of the children of every Sequential in ``model``, then of others, innermost first.

    The empty path stands for ``model`` itself.
    """
    found = []
    for name, module in model.named_modules():
        if is_sequential(module):
            prefix = f"{name}." if name else ""
            found.append(tuple(f"{prefix}{child}" for child, _ in module.named_children()))
    chained = {name for chain in found for name in chain}
    alone = [name for name, _ in model.named_modules() if name and name not in chained]
    alone.sort(key=lambda name: -name.count("."))
    return found + [(name,) for name in (*alone, "")]


def _may(
    model: nn.Module,
    section: Section,
    trace: Trace,
    inputs: dict[nn.Module, Input],
    device: torch.device,
) -> bool:
    taken = inputs.get(model.get_submodule(section.modules[0]))
    owner = model.get_submodule(section.modules[0].rpartition(".")[0])
    if len(section.modules) > 1 and owner not in inputs:
        # Its children are called one by one, and nothing would be cut.
        return False
    if taken is None or not taken.dtype.is_floating_point or reasons(model, section, trace):
        return False
    few = replace(section, slices=min(section.slices, _TRIED))
    try:
        trial(model, few, taken.sample(2 * few.slices, device))
    except (SectionError, torch.OutOfMemoryError):
        return False
    return True


def _sentence(section: Section) -> str:
    ends = [it or "the model" for it in dict.fromkeys((section.modules[0], section.modules[-1]))]
    run = "run" if len(ends) > 1 else "runs"
    return (
        f"{' to '.join(ends)} {run} in {section.slices} slices along the batch, since one op was "
        "over the budget, or would have been beside the workspace that it may ask for: results "
        "differ from plain PyTorch by the order of sums"
    )
