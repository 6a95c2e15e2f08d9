"""belady's planners for one network on one of the founders' machines."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import torch

import belady
from belady.ir.plan import Budget, Keep, Plan
from belady.ir.timeline import Timeline
from belady.planners import POLICIES, Planner
from belady.planners.tvdnn_ilp import TVDNN_ILP
from belady.simulate import simulate
from belady.units import parse_bytes
from benchmarks.average import average
from benchmarks.cases import OURS, SIMULATED, Record
from benchmarks.founders.claims import Net
from benchmarks.founders.iterations import Iteration, Way
from benchmarks.founders.machines import MACHINES
from benchmarks.founders.traces import touched_bytes

FOUNDERS = (
    *("vdnn_all", "vdnn_conv", "vdnn_dyn"),
    *("layrub_inter", "layrub_intra", "layrub_hybrid"),
    *("tvdnn_greedy", "tvdnn_ilp"),
    *("hybrid", "auto"),
)
# How fast the machine is taken to be: at its nominal rates, or as the paper timed it.
NOMINAL, PRINTED = "nominal", "printed"
_ANY = 2**62


def wanted(machine: str, net: Net) -> Iterator[Record]:
    """What names each plan: speed, policy and budget."""
    budgets = ("machine", "paper", "smallest") if net.memory else ("machine", "smallest")
    for speed in (NOMINAL, PRINTED) if net.seconds else (NOMINAL,):
        for policy in FOUNDERS:
            for budget in budgets:
                yield {
                    "machine": machine,
                    "workload": net.workload,
                    "batch": net.batch,
                    "speed": speed,
                    "method": OURS + policy,
                    "budget": budget,
                }


def simulated(
    machine: str, net: Net, plans: Collection[Record], ilp_limit_s: float
) -> Iterator[Record]:
    """Records of the plans that `wanted` names; the integer program may take so long for each."""
    base: Record = {
        "group": SIMULATED,
        "seed": 0,
        "belady": belady.__version__,
        "torch": torch.__version__,
        "cuda": None,
        "device_name": f"simulated {MACHINES[machine].name}",
    }
    try:
        iterations = {NOMINAL: Iteration(machine, net)}
    except ImportError as error:
        for name in plans:
            yield name | base | {"outcome": "absent", "error": str(error)}
        return
    nominal = _kept(iterations[NOMINAL])
    if net.seconds:
        iterations[PRINTED] = Iteration(machine, net, net.seconds / nominal.seconds)
    for name in plans:
        it = iterations[name["speed"]]
        about = base | _everything_kept(it)
        policy = name["method"].removeprefix(OURS)
        planner = POLICIES[policy]
        if planner == TVDNN_ILP:
            planner = replace(TVDNN_ILP, limit_s=ilp_limit_s)
            about |= {"ilp_limit_s": ilp_limit_s}
        yield name | about | _planned(it, planner, _bytes(it, planner, net, name["budget"]))


def _bytes(it: Iteration, planner: Planner, net: Net, budget: str) -> int | None:
    """Bytes of a budget; None is the smallest that the policy states for whole modules."""
    if budget == "smallest":
        return None
    return parse_bytes(net.memory) if budget == "paper" else it.machine.device_bytes


def _planned(it: Iteration, planner: Planner, nbytes: int | None) -> Record:
    """The plan for the first way in which the policy fits, or else for the one that needs least."""
    refused: list[tuple[int, Way, str]] = []
    for way in it.ways(planner.name, nbytes):
        try:
            made = planner(way.trace, it.hardware, Budget(nbytes or 0))
        except belady.InfeasibleBudgetError as error:
            refused.append((error.smallest_bytes, way, f"{error.op} in {error.module}"))
            continue
        return {"budget_bytes": nbytes, **_simulated(it, way, made)}
    smallest, way, peak = min(refused, key=lambda it: it[0])
    if nbytes is None:
        made = planner(way.trace, it.hardware, Budget(smallest))
        return {"budget_bytes": smallest, **_simulated(it, way, made)}
    return {
        "outcome": "infeasible",
        "budget_bytes": nbytes,
        "smallest_bytes": smallest,
        "peak_op": peak,
    }


def _simulated(it: Iteration, way: Way, made: Plan) -> Record:
    timeline = simulate(way.trace, it.hardware, made)
    op = way.trace.ops[timeline.peak_op]
    reasons = [a.reason for a in made.assignments if not isinstance(a.decision, Keep)]
    return {
        "outcome": "simulated",
        "way": way.how,
        "planner": made.planner,
        "reason": reasons[0] if reasons else "",
        "simulated_seconds": timeline.seconds,
        "stall_seconds": timeline.stall_seconds,
        "replay_seconds": timeline.replay_seconds,
        "peak_bytes": max(timeline.curve),
        "average_bytes": average(timeline.curve, way.trace),
        "peak_op": f"{op.name.split('::')[-1]} in {op.module}",
        "peak_op_bytes": touched_bytes(way.trace, op),
        "moved": [[moved.lane, moved.nbytes, moved.copies] for moved in timeline.moved],
    }


def _kept(it: Iteration) -> Timeline:
    trace = it.plain.trace
    return simulate(trace, it.hardware, Plan(trace.fingerprint, "keep", Budget(_ANY)))


def _everything_kept(it: Iteration) -> Record:
    keep = _kept(it)
    return {
        "oracle_seconds": keep.seconds,
        "baseline_peak_bytes": max(keep.curve),
        "baseline_average_bytes": average(keep.curve, it.plain.trace),
        "persistent_bytes": sum(s.nbytes for s in it.plain.trace.storages if s.persistent),
    }
