"""What is done to the modules before a kind of iteration first runs, so that it can fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from belady.eager.limits import foreseen, least_with_state, refuse_infeasible
from belady.eager.ordering import Ordering
from belady.errors import InfeasibleBudgetError
from belady.ir.hardware import HardwareProfile
from belady.ir.trace import Phase, Trace
from belady.measure.held import state_bytes, taken_bytes
from belady.measure.key import Key
from belady.measure.stages import Policy
from belady.planners import traits_of
from belady.sections.cutting import Cutting
from belady.sections.gate import Gate
from belady.sections.heads import Heads
from belady.sections.losses import MATTERS, Losses, all_fits
from belady.units import format_bytes

# What every loss of classes begins with, and what attention has where no fused kernel takes it.
_LOSS, _MATRIX = "_log_softmax", "_safe_softmax"
# Why modules are not in slices: of so many it is said.
_REASONS = 3
_HEADS = (
    "scaled_dot_product_attention runs in slices of heads where no fused kernel takes it, since "
    "the matrix of all queries and keys of all heads ({}) would be held from forward on, and more "
    "than once in backward: results can differ from plain PyTorch by rounding"
)

Call = tuple[Any, Any]


class Admission:
    """Judges calls by their static traces, and changes what stands in the way.

    First losses and attention in slices, and the coordinated order. Then modules in slices.

    Parameters
    ----------
    modules
        The roots; the list may grow.
    """

    def __init__(
        self,
        policy: Policy,
        hardware: HardwareProfile,
        device: torch.device,
        modules: list[torch.nn.Module],
    ) -> None:
        self._policy, self._hardware = policy, hardware
        self._modules = modules
        self._cutting = Cutting(policy, hardware, device)
        self._ordering = Ordering(policy, hardware)
        matters = policy.budget.device_bytes // MATTERS
        self._losses = Losses(device, matters)
        self._heads = Heads(device, matters, self._cutting.gate, modules)
        self._slices_losses = traits_of(policy.name).slices_losses
        self._heads_may = self._slices_losses and not policy.exact
        self._calls = 0
        self._device = device
        self._taken = 0
        self._begun = False
        self._judged: Trace | None = None

    @property
    def gate(self) -> Gate:
        """To be opened for a pass, and shut after it."""
        return self._cutting.gate

    @property
    def said(self) -> tuple[str, ...]:
        """What a user should know of what was changed, one sentence each."""
        largest = self._heads.largest_bytes
        heads = [_HEADS.format(format_bytes(largest))] if largest else []
        return (*self._losses.said, *heads, *self._ordering.said, *self._cutting.said)

    @property
    def least_bytes(self) -> int:
        """Smallest budget with room for an optimizer's state too; 0 where it is not known."""
        judged = self._judged
        return 0 if judged is None else least_with_state(judged, self._hardware, self._policy)

    def leaves_bytes(self, key: Key, module: torch.nn.Module) -> int:
        """What convolutions of an observed iteration are to leave of the budget."""
        return self._cutting.leaves_bytes(key, module)

    def begin(self) -> None:
        """An iteration begins."""
        self._calls = self._heads.calls
        if not self._begun:
            # Until a call is admitted: after it the engine itself holds memory between iterations,
            # and before it what is held may be gone when a refused call is tried again.
            self._taken = taken_bytes(self._modules, self._device)

    def is_cut(self, passes: Sequence[Key]) -> bool:
        """Whether modules, or attention, ran in slices in an iteration, which is over."""
        modules = any(self._cutting.is_cut(key, self._modules[key[0]]) for key in passes)
        return modules or self._heads.calls > self._calls

    def holds(self, key: Key, module: torch.nn.Module) -> bool:
        """Put in force what a call of a kind runs under; False if it must be judged first."""
        return self._cutting.holds(key, module)

    def admit(self, key: Key, module: torch.nn.Module, call: Call) -> None:
        """Refuse what cannot fit, unless it can in the coordinated order or in slices.

        What fits, but not beside the workspaces that a library will ask for, is cut too.

        Raises
        ------
        InfeasibleBudgetError
            If no plan of the policy fits.
        """
        with self._heads.tracing():
            self._admit(key, module, call)
        self._begun = True

    def _admit(self, key: Key, module: torch.nn.Module, call: Call) -> None:
        in_slices = module in self._cutting
        self._cutting.begin(key, module)
        self._ordering.begin(self._modules)
        try:
            trace = self._judged = self._fitting(key, module, call)
            refused = self._cutting.refusal(key)
            if refused is not None:
                raise refused
            if trace is not None:
                self._cutting.make_room(key, module, call, trace)
        except InfeasibleBudgetError as error:
            # The order comes first: it changes no bit. But layers in slices run without.
            answer = self._ordering.answer
            refusal = error if in_slices else answer(error, module, call, self._taken)
            ordered = self._ordering.judged
            if refusal is None and not self._cutting.lacks_workspaces(module, call, ordered):
                return
            with self._ordering.given_up(module) as put_back:
                if refusal is None:
                    if not self._cutting.cut_for_workspaces(key, module, call):
                        put_back()
                        return
                elif not self._cut(key, module, call, refusal.smallest_bytes):
                    raise self._with_slices(refusal) from None
            if not in_slices:
                self._cutting.forget_whole(key, module)

    def unsuited(self, passes: Sequence[Key], trace: Trace) -> int | None:
        """The root whose sections do not suit ``trace``, as observed: they are forgotten now."""
        roots = dict.fromkeys(key[0] for key in passes)
        found = (it for it in roots if self._cutting.unsuited(self._modules[it], trace))
        return next(found, None)

    def too_large(
        self, passes: Sequence[Key], trace: Trace, error: InfeasibleBudgetError
    ) -> int | None:
        """The root that is cut from now on, as it was observed whole and refused for it."""
        if self._heads_may and not self._heads.is_attached and _has(trace, _MATRIX):
            # Of a root that was not the first of its iteration no call was judged.
            self._attach_heads(passes)
            return int(passes[0][0])
        with self._heads.tracing():
            for root in dict.fromkeys(key[0] for key in passes):
                keys = [key for key in passes if key[0] == root]
                if self._cutting.too_large(self._modules[root], keys, trace, error):
                    return int(root)
        return None

    def close(self) -> None:
        """Let everything run as it did."""
        self._cutting.close()
        self._ordering.close()
        self._losses.detach()
        self._heads.detach()

    def _with_slices(self, refusal: InfeasibleBudgetError) -> InfeasibleBudgetError:
        """The refusal, with what modules in slices would need, or why there can be none."""
        least, whole = self._cutting.least_bytes, refusal.smallest_bytes
        if least is None:
            for reason in self._cutting.refused[:_REASONS]:
                refusal.add_note(f"not in slices: {reason}")
            return refusal
        less = InfeasibleBudgetError(
            needed_bytes=refusal.needed_bytes,
            budget_bytes=refusal.budget_bytes,
            smallest_bytes=least,
            op=refusal.op,
            module=refusal.module,
        )
        for note in getattr(refusal, "__notes__", ()):
            less.add_note(note)
        less.add_note(
            f"{least} bytes are enough for modules in slices, which change the order of sums; for "
            f"the bits of plain PyTorch {whole} are needed"
        )
        return less

    def _cut(self, key: Key, module: torch.nn.Module, call: Call, whole: int) -> bool:
        """Run modules in slices; attention as it is, for good, where its slices hinder that."""
        if self._cutting.cut(key, module, call, whole):
            return True
        if not self._heads.is_attached:
            return False
        self._heads.detach()
        if self._cutting.cut(key, module, call, whole):
            self._heads_may, self._heads.largest_bytes = False, 0
            return True
        self._heads.attach()
        return False

    def _fitting(self, key: Key, module: torch.nn.Module, call: Call) -> Trace | None:
        """The static trace of a call that can fit.

        Losses and attention are in slices from now on if need be.
        """
        trace = foreseen(module, call, self._taken)
        self._cutting.held_bytes = 0 if trace is None else state_bytes(trace)
        if self._slices_losses and (trace is None or not self._can_keep_all(trace)):
            self._losses.attach()
            if self._heads_may and (trace is None or _has(trace, _MATRIX)):
                self._attach_heads([key])
            if trace is not None and _has(trace, _LOSS, _MATRIX):
                trace = foreseen(module, call, self._taken)
        if trace is not None:
            refuse_infeasible(trace, self._hardware, self._policy)
        return trace

    def _attach_heads(self, passes: Sequence[Key]) -> None:
        if not self._heads.is_attached:
            self._heads.attach()
            # What was observed before has attention as it was.
            for key in passes:
                self._cutting.forget_whole(key, self._modules[key[0]])

    def _can_keep_all(self, trace: Trace) -> bool:
        read = {v for op in trace.ops if op.phase is Phase.LOSS for v in op.reads}
        outputs = {trace.values[value].storage for value in read}
        given = sum(trace.storages[it].nbytes for it in outputs)
        return all_fits(trace, self._hardware, self._policy, given)


def _has(trace: Trace, *names: str) -> bool:
    return any(name in op.name for op in trace.ops for name in names)
