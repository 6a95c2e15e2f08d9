"""One kind of iteration: how far belady has come with it, and how a plan is made and corrected."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from belady.eager.digests import Digests
from belady.eager.planned import Planned
from belady.eager.replay import Recipes
from belady.ir.hardware import HardwareProfile
from belady.ir.trace import Trace
from belady.measure.calls import compiled_anything
from belady.measure.key import Key
from belady.measure.progress import Progress
from belady.measure.stages import Policy
from belady.measure.trial import Trial
from belady.measure.verification import Verification
from belady.memory.carrier import Carrier
from belady.memory.lasting import LARGE_BYTES
from belady.planners import traits_of
from belady.simulate.blocks import gradient_bytes, in_blocks

# Before there is a plan, gradients that need more than this part of the budget stay among the rest:
# memory set apart is idle in forward.
_GRADIENTS_SHARE = 1 / 8
_NO_REPLAYS = (
    "nothing is recomputed or encoded, which policy={!r} would where it gains, since {}: "
    "engine='graph' can; or {}"
)
_AMONG_OTHERS = (
    "torch.distributed is in use, and other processes would go on with gradients that one finds "
    "wrong",
    "do without torch.distributed",
)
_COMPILED = (
    "torch.compile was used in this process (engine='auto' uses it too), and the calls inside of "
    "compiled code cannot be compared",
    "do without torch.compile and with engine='eager' from the start of the process",
)


@dataclass
class Kind(Progress):
    """One kind of iteration and what is known of it.

    Attributes
    ----------
    passes
        Keys of its passes, in order.
    warm
        Trace of its first iteration.
    recipes
        How its ops are run again.
    varying
        Calls of the program whose numbers change from iteration to iteration.
    engine
        Carries out the plan in force; None where nothing moves.
    numerics
        What can change a bit besides the settings of a plan.
    apart
        Whether gradients have memory of their own under the plan in force.
    """

    passes: tuple[Key, ...] = ()
    warm: Trace | None = None
    trace: Trace | None = None
    recipes: Recipes = field(default_factory=Recipes)
    varying: set[tuple[int, int]] = field(default_factory=set)
    engine: Planned | None = None
    numerics: tuple[str, ...] = ()
    apart: bool = False

    def gradients_apart_most(self, budget_bytes: int) -> int:
        """Most bytes of gradients that have memory of their own."""
        if self.trial is None:
            return int(_GRADIENTS_SHARE * budget_bytes)
        return sys.maxsize if self.apart else 0

    @property
    def roots(self) -> set[int]:
        """Numbers of the roots that are called in it."""
        return {root for root, *_ in self.passes}

    def observe_again(self) -> None:
        """Forget the plan: the program has changed."""
        super().observe_again()
        self.settle()
        self.engine = None

    def forget(self) -> None:
        """Nobody asks for it any more."""
        self._give_up()
        self.settle()

    def settle(self) -> None:
        """Wait until all replays so far are known to be right.

        Raises
        ------
        ReplayError
            If one was not.
        """
        if self.engine is not None:
            self.engine.digests.settle()


class Planning:
    """Plans a kind of iteration, and corrects the plan by what was measured under it.

    Parameters
    ----------
    persistent
        Addresses of parameters and buffers, kept up to date by the owner.
    fallback
        Saves what cannot be recomputed after all.
    hold
        Has memory of their own for that many bytes of gradients.

    Attributes
    ----------
    notes
        What a user should know of corrections, one sentence each.
    """

    def __init__(
        self,
        policy: Policy,
        hardware: HardwareProfile,
        carrier: Carrier,
        persistent: set[int],
        fallback: Callable[[torch.Tensor], Any],
        hold: Callable[[int], None],
    ) -> None:
        self.policy = policy
        self._hold = hold
        self._verification = Verification(policy, hardware)
        self.notes = self._verification.notes
        self._replays = True
        self._hardware = hardware
        self._carrier = carrier
        self._persistent = persistent
        self._fallback = fallback

    def may_replay(self) -> bool:
        """Whether values may be recomputed: all calls are seen, and none came out otherwise.

        Not among processes: the others would go on with gradients that one of them finds wrong.
        Nor where the policy does not: trials take memory, and a library that finds too little of
        it takes another algorithm from then on.
        """
        wanted = self._replays and traits_of(self.policy.name).recomputes
        return wanted and _in_the_way() is None

    def check_replays(self, kind: Kind) -> None:
        """Observe a kind again that may not go on with what its plan recomputes."""
        engine = kind.engine
        if engine is None or engine.calls is None:
            return
        self._replays = self._replays and not engine.digests.refuted
        if not self.may_replay():
            kind.observe_again()

    def plan(self, kind: Kind, trace: Trace, recipes: Recipes) -> None:
        """Make the first plan.

        Raises
        ------
        InfeasibleBudgetError
            If no plan of the policy fits.
        """
        kind.trace, kind.recipes = trace, recipes
        self._put_in_force(kind, trace, self._verification.first(trace, *kind.numerics))

    def verify(self, kind: Kind) -> None:
        """Keep the plan that was measured, or put another in force."""
        if kind.trace is None:
            return
        defaults = kind.engine.defaults if kind.engine is not None else {}
        counted = tuple(sorted(defaults.items()))
        known = self._verification, kind.trace, kind.numerics, counted
        kind.trace, chosen = kind.conclude(*known)
        if chosen is not None:
            self._put_in_force(kind, kind.trace, chosen)

    def tighten(self, kind: Kind) -> None:
        """After the device ran out of memory: leave the allocator more room."""
        kind.starved = False
        if kind.trace is None:
            return
        chosen = kind.tighten(self._verification, kind.trace, kind.numerics)
        if chosen is not None:
            self._put_in_force(kind, kind.trace, chosen)

    def _put_in_force(self, kind: Kind, trace: Trace, trial: Trial) -> None:
        plan, carrier = trial.plan, self._carrier
        kind.settle()
        kind.engine = None
        if not plan.moves_nothing:
            self._say_what_is_off()
            digests = Digests(at_once=self.policy.exact or carrier.device.type == "cpu")
            known = self._persistent, kind.recipes, self._fallback
            kind.engine = Planned(trace, plan, carrier, *known, digests)
            # A CPU has no blocks of torch's, and nothing is set apart there.
            on_gpu = carrier.device.type == "cuda"
            kind.apart = on_gpu and in_blocks(trace, plan, trial.hardware.allocator).gradients_apart
            if kind.apart:
                self._hold(gradient_bytes(trace, plan, LARGE_BYTES))
        kind.begin(trial, trace, carrier)

    def _say_what_is_off(self) -> None:
        why = _in_the_way()
        if why is None or not traits_of(self.policy.name).recomputes:
            return
        note = _NO_REPLAYS.format(self.policy.name, *why)
        if note not in self.notes:
            self.notes.append(note)


def _in_the_way() -> tuple[str, str] | None:
    """What forbids replays in this process, and what can be done; None if nothing does."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return _AMONG_OTHERS
    return _COMPILED if compiled_anything() else None
