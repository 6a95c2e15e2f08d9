"""belady's planners for one network on one of the founders' machines."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import belady
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Budget, Plan
from belady.ir.timeline import Timeline
from belady.ir.trace import Trace
from belady.planners import plan, smallest_budget
from belady.simulate import simulate
from benchmarks.cases import OURS, SIMULATED, Record
from benchmarks.founders.machines import MACHINES
from benchmarks.founders.traces import flops, observed_on, static
from benchmarks.workloads import WORKLOADS, Setting

POLICIES = ("vdnn_all", "vdnn_conv", "vdnn_dyn", "lifetime", "auto")


def simulated(machine: str, net: str, batch: int) -> Iterator[Record]:
    """Records of all policies, within what the machine has and within their smallest budgets."""
    base: Record = {
        "workload": net,
        "batch": batch,
        "machine": machine,
        "group": SIMULATED,
        "seed": 0,
        "belady": belady.__version__,
        "torch": torch.__version__,
        "cuda": None,
        "device_name": f"simulated {MACHINES[machine].name}",
    }
    try:
        work = WORKLOADS[net].make(Setting("fp32", device="cpu"), {"batch": batch}, False)
    except ImportError as error:
        yield base | {"method": "none", "outcome": "absent", "error": str(error)}
        return
    trace = observed_on(MACHINES[machine], static(work), flops(work))
    del work
    hardware = MACHINES[machine].profile()
    keep = simulate(trace, hardware, Plan(trace.fingerprint, "keep", Budget(2**62)))
    base |= {
        "oracle_seconds": keep.seconds,
        "baseline_peak_bytes": max(keep.curve),
        "baseline_average_bytes": _average(keep, trace),
    }
    for policy in POLICIES:
        smallest = smallest_budget(policy, trace, hardware, Budget(2**62))
        for name, nbytes in (("machine", MACHINES[machine].device_bytes), ("smallest", smallest)):
            record = base | {"method": OURS + policy, "budget": name, "budget_bytes": nbytes}
            yield record | _planned(policy, trace, hardware, nbytes)


def _planned(policy: str, trace: Trace, hardware: HardwareProfile, nbytes: int) -> Record:
    try:
        made = plan(policy, trace, hardware, Budget(nbytes))
    except belady.InfeasibleBudgetError as error:
        return {"outcome": "infeasible", "smallest_bytes": error.smallest_bytes}
    timeline = simulate(trace, hardware, made)
    return {
        "outcome": "simulated",
        "planner": made.planner,
        "simulated_seconds": timeline.seconds,
        "peak_bytes": max(timeline.curve),
        "average_bytes": _average(timeline, trace),
        "moved": [[moved.lane, moved.nbytes, moved.copies] for moved in timeline.moved],
    }


def _average(timeline: Timeline, trace: Trace) -> int:
    """Bytes held, averaged over kernel time (waits have no curve of their own)."""
    seconds = [op.device_seconds for op in trace.ops]
    weighted = sum(held * time for held, time in zip(timeline.curve, seconds, strict=True))
    return int(weighted / sum(seconds))
