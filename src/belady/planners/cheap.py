"""A policy that computes no convolution again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Budget, Plan
from belady.ir.trace import Trace
from belady.planners.base import Planner
from belady.planners.hybrid import HYBRID
from belady.planners.workspace import convolves


@dataclass(frozen=True, slots=True)
class Cheap:
    """What ``policy`` does where convolutions run once, as SuperNeurons has them.

    A convolution is the dearest to compute again, and asks for workspace when it is: where memory
    is scarce cuDNN may not get what the algorithm needs that it took before, and another one gives
    other bits.

    Source: SuperNeurons (Wang et al., PPoPP 2018), section 3.4, cost-aware recomputation.
    """

    policy: Planner

    @property
    def name(self) -> str:
        """That of the policy, and what is left of it."""
        return f"{self.policy.name}_cheap"

    @property
    def version(self) -> int:
        """That of the policy."""
        return self.policy.version

    @property
    def recomputes(self) -> bool:
        """What the policy does."""
        return self.policy.recomputes

    def __call__(
        self, trace: Trace, hardware: HardwareProfile, budget: Budget, *, exact: bool = False
    ) -> Plan:
        """See `belady.planners.base.Planner`."""
        ops = (replace(op, replayable=op.replayable and not convolves(op)) for op in trace.ops)
        made = self.policy(replace(trace, ops=tuple(ops)), hardware, budget, exact=exact)
        return replace(made, planner=f"{self.name}/{self.version}")


HYBRID_CHEAP = Cheap(HYBRID)
