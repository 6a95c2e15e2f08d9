"""belady's planners for one network on one of the founders' machines."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import belady
from belady.ir.plan import Budget, Keep, Plan
from belady.ir.timeline import Timeline
from belady.planners import POLICIES, Planner, traits_of
from belady.planners.tvdnn_ilp import TVDNN_ILP
from belady.simulate import simulate
from belady.units import parse_bytes
from benchmarks.average import average
from benchmarks.cases import OURS, SIMULATED, Record
from benchmarks.founders.claim import Net
from benchmarks.founders.iterations import Iteration, Way
from benchmarks.founders.machines import MACHINES
from benchmarks.founders.traces import touched_bytes
from benchmarks.provenance import provenance

_OC_DNN = ("ocdnn_naive", "ocdnn_opt")
FOUNDERS = (
    *("vdnn_all", "vdnn_conv", "vdnn_dyn"),
    *("layrub_inter", "layrub_intra", "layrub_hybrid"),
    *("tvdnn_greedy", "tvdnn_ilp"),
    *_OC_DNN,
    *("hybrid", "auto"),
)
# How fast the machine is taken to be: at its nominal rates, or as the paper timed it; and as the
# paper timed it, with bytes that take longer to move by as much as the paper's system held more.
NOMINAL, PRINTED, HELD = "nominal", "printed", "held"
# Of these systems a paper says what was held with everything kept.
_KNOWN_TO_HOLD = ("layrub_hybrid", *_OC_DNN)
_ANY = 2**62


def wanted(machine: str, net: Net) -> Iterator[Record]:
    """What names each plan: speed, policy and budget."""
    for speed in _speeds(net):
        for policy in _policies(machine, speed):
            for budget in _budgets(net):
                yield {
                    "machine": machine,
                    "workload": net.workload,
                    "batch": net.batch,
                    "speed": speed,
                    "method": OURS + policy,
                    "budget": budget,
                }


def _speeds(net: Net) -> tuple[str, ...]:
    if not net.seconds:
        return (NOMINAL,)
    return (NOMINAL, PRINTED, HELD) if net.in_core or net.held else (NOMINAL, PRINTED)


def _policies(machine: str, speed: str) -> tuple[str, ...]:
    paged = MACHINES[machine].paging is not None
    asked = _KNOWN_TO_HOLD if speed == HELD else FOUNDERS
    return tuple(policy for policy in asked if paged or not traits_of(policy).managed)


def _budgets(net: Net) -> tuple[str, ...]:
    known = ("machine", "paper" if net.memory else "", "share" if net.in_core else "", "smallest")
    return tuple(filter(None, known))


def simulated(
    machine: str, net: Net, plans: Collection[Record], ilp_limit_s: float
) -> Iterator[Record]:
    """Records of the plans that `wanted` names; the integer program may take so long for each."""
    base: Record = provenance("cpu") | {
        "group": SIMULATED,
        "seed": 0,
        "device_name": f"simulated {MACHINES[machine].name}",
    }
    try:
        nominal = Iteration(machine, net)
        share = _in_core(machine, net)
    except ImportError as error:
        for name in plans:
            yield name | base | {"outcome": "absent", "error": str(error)}
        return
    iterations = _iterations(machine, net, nominal, share)
    for name in plans:
        it = iterations[name["speed"]]
        about = base | _everything_kept(it)
        policy = name["method"].removeprefix(OURS)
        planner = POLICIES[policy]
        if planner == TVDNN_ILP:
            planner = replace(TVDNN_ILP, limit_s=ilp_limit_s)
            about |= {"ilp_limit_s": ilp_limit_s}
        nbytes = {
            "machine": it.machine.device_bytes,
            "paper": parse_bytes(net.memory) if net.memory else None,
            "share": share,
            # The smallest that the policy states for whole modules.
            "smallest": None,
        }
        yield name | about | _planned(it, planner, nbytes[name["budget"]])


def _in_core(machine: str, net: Net) -> int | None:
    """Bytes that our trace holds at the batch that the paper ran in core."""
    if not net.in_core:
        return None
    return max(_kept(Iteration(machine, replace(net, batch=net.in_core))).curve)


def _iterations(
    machine: str, net: Net, nominal: Iteration, share: int | None
) -> Mapping[str, Iteration]:
    found = {NOMINAL: nominal}
    kept = _kept(nominal)
    if net.seconds:
        slower = net.seconds / kept.seconds
        found[PRINTED] = Iteration(machine, net, slower)
        if net.held:
            found[HELD] = Iteration(machine, net, slower, parse_bytes(net.held) / max(kept.curve))
        elif share:
            heavier = nominal.machine.device_bytes / share
            found[HELD] = Iteration(machine, net, slower, heavier)
    return found


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
