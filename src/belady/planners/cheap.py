"""The hybrid policy that computes no convolution again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Budget, Plan
from belady.ir.trace import Trace
from belady.planners.hybrid import HYBRID
from belady.planners.traits import Traits
from belady.planners.workspace import convolving_once


@dataclass(frozen=True, slots=True)
class Cheap:
    """What `belady.planners.hybrid.Hybrid` does where convolutions run once, as SuperNeurons does.

    A convolution is the dearest to compute again, and asks for workspace when it is: where memory
    is scarce cuDNN may not get what the algorithm needs that it took before, and another one gives
    other bits.

    Source: SuperNeurons (Wang et al., PPoPP 2018), cost-aware recomputation.
    """

    name: str = "hybrid_cheap"
    version: int = HYBRID.version
    traits: Traits = Traits(recomputes=True, fills=True, slices_losses=True)

    def __call__(
        self, trace: Trace, hardware: HardwareProfile, budget: Budget, *, exact: bool = False
    ) -> Plan:
        """See `belady.planners.base.Planner`."""
        made = HYBRID(convolving_once(trace), hardware, budget, exact=exact)
        return replace(made, planner=f"{self.name}/{self.version}")


HYBRID_CHEAP = Cheap()
