"""A workload under one or several methods, in a process of its own; prints a JSON line for each.

Methods: ``plain``, ``save_on_cpu`` (pinned), or belady policies separated by commas. Budget: bytes
as people write them, ``none``, or ``own``: the smallest budget that the policy states for this
workload (its predicted peak plus the stated margin), from a trace made in the same process.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import belady
from belady.ir.plan import Budget
from belady.ir.trace import Tier
from belady.planners import smallest_budget
from belady.units import parse_bytes
from benchmarks.workloads import WORKLOADS, Setting, Workload

# Iterations before timing starts: of plain methods, and at most of ours (observed, verified and
# possibly planned again).
WARM_UP, WARM_UP_MOST = 5, 24


def main() -> None:
    """Run the cases that the arguments name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("methods")
    parser.add_argument("budget")
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    setting = Setting(arguments.precision, arguments.channels_last, arguments.device)
    setting.apply()
    sizes = {} if arguments.batch is None else {"batch": arguments.batch}
    work = WORKLOADS[arguments.workload](setting, **sizes)
    for method in arguments.methods.split(","):
        record = {
            "workload": arguments.workload,
            "method": method,
            "budget": arguments.budget,
            "batch": arguments.batch,
            **asdict(setting),
            "seed": 0,
            **_versions(setting),
            **_outcome(work, setting, method, arguments),
        }
        print(json.dumps(record), flush=True)


def _outcome(
    work: Workload, setting: Setting, method: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Running out of memory is a result, not a crash."""
    try:
        return _run(work, setting, method, arguments) | {"outcome": "ok"}
    except (torch.OutOfMemoryError, belady.OutOfMemoryError) as error:
        return {"outcome": "out of memory", "error": str(error)[:300]}
    except belady.InfeasibleBudgetError as error:
        return {
            "outcome": "infeasible",
            "error": str(error)[:300],
            "smallest_bytes": error.smallest_bytes,
        }


def _run(
    work: Workload, setting: Setting, method: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    budget, repeats = arguments.budget, arguments.repeats
    if method in ("plain", "save_on_cpu"):
        if budget != "none":
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(parse_bytes(budget) / total)
        begun = time.perf_counter()
        _iterate(work, setting, method, WARM_UP)
        warm = {"warm_up": WARM_UP, "warm_up_seconds": time.perf_counter() - begun}
        return warm | _timed(work, setting, method, repeats)
    nbytes: object = "1TiB" if budget == "none" else budget
    if budget == "own":
        nbytes = _own_budget(work, setting, method)
    phases: list[str] = []
    with belady.virtualize(work.model, nbytes, policy=method) as vm:
        vm.listeners.append(lambda stats: phases.append(stats.phase))
        begun = time.perf_counter()
        while len(phases) < WARM_UP_MOST and phases[-1:] != ["steady"]:
            _iterate(work, setting, "plain", 1)
        record = {
            "budget_bytes": nbytes if isinstance(nbytes, int) else parse_bytes(nbytes),
            "warm_up": len(phases),
            "warm_up_seconds": time.perf_counter() - begun,
        }
        record |= _timed(work, setting, "plain", repeats)
        return record | _of_run(vm)


def _own_budget(work: Workload, setting: Setting, policy: str) -> int:
    """Smallest budget of ``policy`` by the trace of a run without a cap."""
    with belady.virtualize(work.model, "1TiB", policy="floor") as vm:
        _iterate(work, setting, "plain", 3)
        run = vm.run()
    if run is None:
        raise RuntimeError("no plan after three iterations")
    return smallest_budget(policy, run.trace, run.hardware, Budget(2**62))


def _timed(work: Workload, setting: Setting, method: str, repeats: int) -> dict[str, Any]:
    """Times of single iterations, each waited for, and of as many in a row."""
    cuda = setting.device == "cuda"
    retries = 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
    losses, seconds = [], []
    for _ in range(repeats):
        begun = time.perf_counter()
        losses += _iterate(work, setting, method, 1)
        seconds.append(time.perf_counter() - begun)
    begun = time.perf_counter()
    losses += _iterate(work, setting, method, repeats)
    record = {
        "seconds": seconds,
        "median_seconds": statistics.median(seconds),
        "pipelined_seconds": (time.perf_counter() - begun) / repeats,
        "losses": losses,
    }
    if cuda:
        stats = torch.cuda.memory_stats()
        record |= {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "allocation_retries": stats["num_alloc_retries"] - retries,
        }
    return record


def _iterate(work: Workload, setting: Setting, method: str, count: int) -> list[float]:
    """Run iterations and wait for the device once, at the end."""
    losses = []
    for _ in range(count):
        images, labels = next(work.batches)
        saving = (
            torch.autograd.graph.save_on_cpu(pin_memory=True)
            if method == "save_on_cpu"
            else nullcontext()
        )
        with setting.autocast(), saving:
            loss = cross_entropy(work.model(images), labels)
        loss.backward()
        work.optimizer.step()
        work.optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def _of_run(vm: belady.VirtualMemory) -> dict[str, Any]:
    run = vm.run()
    if run is None:
        return {}
    measured = run.measured
    record: dict[str, Any] = {
        "planner": run.plan.planner,
        "moved_values": len(run.plan.decisions),
        "predicted_peak_bytes": run.plan.predicted_peak_bytes,
        "predicted_seconds": run.predicted.seconds,
        "predicted_stall_seconds": run.predicted.stall_seconds,
        "kernel_seconds": run.predicted.compute_seconds,
        "host_seconds": sum(op.host_seconds for op in run.trace.ops),
        "workspace_bytes": max(op.workspace_bytes for op in run.trace.ops),
        "ops": len(run.trace.ops),
        "margin": [
            run.hardware.allocator.margin_fraction,
            run.hardware.allocator.margin_bytes,
        ],
        "links": [
            [link.source, link.target, link.bytes_per_s, link.duplex_bytes_per_s]
            for link in run.hardware.links
        ],
        "largest_bytes": max((s.nbytes for s in run.trace.storages), default=0),
        "notes": list(run.notes),
    }
    if measured is not None:
        record |= {
            "verified_peak_bytes": measured.peak(Tier.DEVICE),
            "verified_reserved_bytes": measured.reserved_bytes,
            "verified_seconds": list(measured.iterations),
            "host_bytes": measured.peak(Tier.HOST),
            "stall_seconds": measured.stall_seconds,
            "moved": [[m.lane, m.nbytes, m.copies] for m in measured.moved],
            "defaults": list(measured.defaults),
        }
    return record


def _versions(setting: Setting) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if setting.device == "cuda" else platform.processor()
    return {
        "belady": belady.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "device_name": name,
    }


if __name__ == "__main__":
    main()
