"""What is done to the modules of a root whose graph no plan can hold: sections, before it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from belady.errors import InfeasibleBudgetError
from belady.ir.hardware import HardwareProfile
from belady.ir.trace import Trace
from belady.measure.key import Key, pass_key
from belady.measure.stages import Policy
from belady.planners.places import Sections
from belady.sections.choice import COPIES
from belady.sections.cutting import Cutting
from belady.sections.unrolled import Unrolling

Call = tuple[Any, Any]
# What names calls that are alike but for what learns and has gradients.
Alike = tuple[Any, ...]

# How often modules are cut anew for one call, each time for what the graph lacked; and kinds of
# calls of which it is remembered that they were weighed.
_TRIES, _KINDS = 4, 64
# Why modules are not in slices: of so many it is said.
_REASONS = 3
_AS_BEFORE = "modules run in slices already, and none are found that need less"


class Admission:
    """Answers refusals of graphs of which nothing has run.

    A graph is judged when it is first called: what it needs is read off itself. Where that is too
    much, modules are put in slices, and the call is made again, with a graph that has them.

    Attributes
    ----------
    began
        Whether a graph of the call under way has been let run.
    """

    def __init__(self, policy: Policy, hardware: HardwareProfile, device: torch.device) -> None:
        self.began = self._closed = False
        self._budget = policy.budget.device_bytes
        self._device = device
        # Slices of tokens are copies made dense, of which a graph knows nothing yet.
        self._cutting = Cutting(policy, hardware, device, self._put, alongs=(0,))
        self._in_force: dict[nn.Module, Unrolling] = {}
        # What calls of a kind ran in when they, or iterations with them, were refused.
        self._refused = set[tuple[Key, Unrolling | None]]()
        self._under: tuple[nn.Module, Call] | None = None
        # Calls that were weighed, and those alike of which the next one is cut before.
        self._weighed, self._lacking = set[Alike](), set[Alike]()
        # Kinds of calls take turns, and each would be captured anew with another one.
        self._made: dict[tuple[nn.Module, Sections], Unrolling] = {}

    @property
    def said(self) -> list[str]:
        """What a user should know of the sections, one sentence each."""
        return self._cutting.said

    def in_force(self, module: nn.Module) -> Unrolling | None:
        """The sections of a root; None if it runs whole."""
        return self._in_force.get(module)

    def admitted(
        self,
        module: nn.Module,
        call: Call,
        run: Callable[[], Any],
        aside: Callable[[], AbstractContextManager[None]],
    ) -> Any:
        """Run a call of a root, in slices if need be.

        Parameters
        ----------
        run
            Makes the call.
        aside
            Has the roots be what they are without the engine.

        Raises
        ------
        InfeasibleBudgetError
            If no plan of the policy fits, and no sections help.
        """
        if not self._cutting.may_cut:
            return run()
        if self._in_force or module in self._cutting:
            with aside():
                self._settle(module, call)
        if self._lacking and _alike(key := self._key(module, call)) in self._lacking:
            self._lacking.discard(_alike(key))
            with aside():
                self._cutting.begin(key, module)
                self._cutting.cut_for_workspaces(key, module, call, COPIES[1:2])
        for _ in range(_TRIES):
            try:
                return self._through(module, call, run)
            except InfeasibleBudgetError as error:
                # A traceback keeps the frames of all callers, and with them the user's tensors.
                refusal = error.with_traceback(None)
            if self._closed:
                raise refusal  # by the engine that has gone on in the place of this one
            if self.began:
                refusal.add_note("not in slices: parts of the call had run when it was refused")
                raise refusal
            with aside():
                self._cut(module, call, refusal)
        return self._through(module, call, run)

    def weigh(self, trace: Trace) -> int:
        """See whether a graph that fits does so beside what libraries ask for.

        Else modules are cut before the next call of its kind. Not in this one: what Dynamo left out
        before the graph has run, and would run again.

        Returns
        -------
        leaves : int
            Bytes that its convolutions are to leave of the budget, as they did when slices were
            raced.
        """
        if self._under is None or self._closed:
            return 0
        module, key = self._under[0], self._key(*self._under)
        alike = _alike(key)
        if not (self.began or alike in self._weighed):
            if len(self._weighed) >= _KINDS:
                self._weighed.clear()
                self._lacking.clear()
            self._weighed.add(alike)
            cut = self._cutting.is_cut(key, module)
            if not cut and self._cutting.lacks_workspaces(*self._under, trace):
                self._lacking.add(alike)
        return self._cutting.leaves_bytes(key, module)

    def close(self) -> None:
        """Let everything run as it did. Idempotent."""
        self._closed = True
        self._cutting.close()
        self._in_force.clear()
        self._made.clear()
        self._refused.clear()

    def _settle(self, module: nn.Module, call: Call) -> None:
        """Put in force what was decided for calls of this kind; the others run whole at first."""
        key = self._key(module, call)
        if not self._cutting.holds(key, module):
            self._cutting.begin(key, module)

    def _through(self, module: nn.Module, call: Call, run: Callable[[], Any]) -> Any:
        self.began, outer = False, self._under
        sections, self._under = self.in_force(module), (module, call)
        with nullcontext() if sections is None else sections.standing():
            self._cutting.gate.open(module)
            try:
                return run()
            finally:
                self._under = outer
                self._cutting.gate.shut(module)

    def _cut(self, module: nn.Module, call: Call, refusal: InfeasibleBudgetError) -> None:
        """Put modules in slices, or in more of them.

        Raises
        ------
        InfeasibleBudgetError
            The refusal, if that cannot be.
        """
        cutting, key = self._cutting, self._key(module, call)
        over = max(1, refusal.smallest_bytes - self._budget)
        finer = cutting.is_cut(key, module)
        self._refused.add((key, self.in_force(module)))
        cutting.begin(key, module)
        if not finer and self._cuts_anew(key, module, call):
            return
        # Op by op it fits: it is the graph, an iteration of several, or an optimizer's state that
        # needs more. Slices that need far less than they may are found again with a little less.
        for _ in range(_TRIES):
            cutting.leave(over)
            if self._cuts_anew(key, module, call):
                return
            if not cutting.is_cut(key, module):
                break
        else:
            refusal.add_note(_AS_BEFORE)
        for reason in cutting.refused[:_REASONS]:
            refusal.add_note(f"not in slices: {reason}")
        raise refusal

    def _cuts_anew(self, key: Key, module: nn.Module, call: Call) -> bool:
        """Cut modules; False if there are no slices but those that were refused."""
        cut = self._cutting.cut(key, module, call)
        return cut and (key, self.in_force(module)) not in self._refused

    def _key(self, module: nn.Module, call: Call) -> Key:
        return pass_key(id(module), module, call, self._device)

    def _put(
        self, module: nn.Module, sections: Sections, when: Callable[[], bool]
    ) -> Callable[[], None]:
        """Put sections in force, while calls are made."""
        known = module, sections
        if known not in self._made:
            self._made[known] = Unrolling(module, sections, when)
        self._in_force[module] = self._made[known]

        def undo() -> None:
            self._in_force.pop(module, None)

        return undo


def _alike(key: Key) -> Alike:
    """Without whether there are gradients: they stay where they are only zeroed."""
    root, _, *rest = key
    return root, *rest
