"""A policy with the convolution algorithms that have least workspace."""

from __future__ import annotations

from dataclasses import dataclass, replace

from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Budget, Plan
from belady.ir.trace import Trace
from belady.planners.base import Planner
from belady.planners.traits import Traits
from belady.planners.workspace import UNCHANGED, leaner


@dataclass(frozen=True, slots=True)
class Lean:
    """What ``policy`` does with an iteration that runs with `Workspace.MEMORY`.

    It goes on as ``policy`` alone where nothing would change, and with ``exact``.
    """

    policy: Planner

    @property
    def name(self) -> str:
        """That of the policy."""
        return self.policy.name

    @property
    def version(self) -> int:
        """That of the policy."""
        return self.policy.version

    @property
    def traits(self) -> Traits:
        """Those of the policy."""
        return self.policy.traits

    def __call__(
        self, trace: Trace, hardware: HardwareProfile, budget: Budget, *, exact: bool = False
    ) -> Plan:
        """See `belady.planners.base.Planner`."""
        lean, algorithms = leaner(trace)
        if exact or algorithms == UNCHANGED:
            return self.policy(trace, hardware, budget, exact=exact)
        made = self.policy(lean, hardware, budget)
        return replace(
            made,
            trace=trace.fingerprint,
            workspace=algorithms.workspace,
            layer_algorithms=algorithms.by_op,
            numerics=algorithms.numerics,
        )
