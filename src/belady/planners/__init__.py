"""Policies: a trace, a machine and a budget in, a Plan out. Never imports torch.

A new policy is one file with one `Planner`, which says what engines do for it beside carrying out
its plans (`Traits`), and an entry in `POLICIES`; then the conformance suite
(``tests/conformance/test_planners.py``) checks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from belady.errors import InfeasibleBudgetError
from belady.ir.collector import uncollected
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Budget, Plan
from belady.ir.trace import Trace
from belady.planners.auto import AUTO
from belady.planners.base import Planner
from belady.planners.baseline import BASELINE
from belady.planners.cheap import HYBRID_CHEAP
from belady.planners.floor import FLOOR
from belady.planners.hybrid import HYBRID
from belady.planners.layrub import LAYRUB_HYBRID, LAYRUB_INTER, LAYRUB_INTRA
from belady.planners.lifetime import LIFETIME
from belady.planners.ocdnn import OCDNN_NAIVE, OCDNN_OPT
from belady.planners.traits import Traits
from belady.planners.tvdnn_greedy import TVDNN_GREEDY
from belady.planners.tvdnn_ilp import TVDNN_ILP
from belady.planners.vdnn import VDNN_ALL, VDNN_CONV, VDNN_DYN

__all__ = ["POLICIES", "Planner", "plan", "smallest_budget", "traits_of"]

_PLANNERS: tuple[Planner, ...] = (
    *(AUTO, HYBRID, HYBRID_CHEAP, LIFETIME, VDNN_ALL, VDNN_CONV, VDNN_DYN, TVDNN_ILP, TVDNN_GREEDY),
    *(LAYRUB_HYBRID, LAYRUB_INTER, LAYRUB_INTRA, OCDNN_NAIVE, OCDNN_OPT, FLOOR, BASELINE),
)
# Planners by the name that users give, the default first.
POLICIES: Mapping[str, Planner] = MappingProxyType({it.name: it for it in _PLANNERS})


def traits_of(policy: str) -> Traits:
    """What engines do for a policy in `POLICIES`."""
    return POLICIES[policy].traits


def plan(
    policy: str, trace: Trace, hardware: HardwareProfile, budget: Budget, *, exact: bool = False
) -> Plan:
    """Plan ``trace`` on ``hardware`` within ``budget``.

    Parameters
    ----------
    policy
        A name in `POLICIES`.
    exact
        Forbid every setting that can change a bit of the result.

    Raises
    ------
    ValueError
        If there is no such policy.
    InfeasibleBudgetError
        If no plan of the policy fits; it names the smallest budget that does.
    """
    if policy not in POLICIES:
        raise ValueError(f"there is no policy {policy!r}: choose one of {', '.join(POLICIES)}")
    try:
        with uncollected():
            return POLICIES[policy](trace, hardware, budget, exact=exact)
    finally:
        # Only planners ask so often, and a trace is kept for as long as a program trains.
        trace.worked_out.clear()


def smallest_budget(
    policy: str, trace: Trace, hardware: HardwareProfile, budget: Budget, *, exact: bool = False
) -> int:
    """Smallest device budget, in bytes, that the policy accepts.

    The device bytes of ``budget`` do not matter, those of the other tiers do.

    Raises
    ------
    ValueError
        If there is no such policy.
    """
    try:
        plan(policy, trace, hardware, replace(budget, device_bytes=0), exact=exact)
    except InfeasibleBudgetError as error:
        return error.smallest_bytes
    return 0
