from __future__ import annotations

import builtins
import importlib
import math
import time
from collections.abc import Mapping, Sequence
from types import ModuleType

import pytest

from belady.errors import MissingExtraError
from belady.ir.hardware import Allocator
from belady.ir.plan import Budget, Offload
from belady.ir.trace import Tier
from belady.simulate import bound, simulate
from belady.simulate.relaxation import Relaxation
from tests.support import strategies
from tests.unit.simulate.cases import cpu, gpu, machine, plan_of, trace_of

# The package names the function as its module.
bounds = importlib.import_module("belady.simulate.bound")


def test_a_budget_for_everything_costs_nothing() -> None:
    trace = trace_of([1, 1, 1], [(4, 0, 2)])
    found = bound(trace, gpu(), Budget(4))
    assert (found.status, found.seconds, found.stall_seconds) == ("kept", 3, 0)
    assert found.feasible


def test_an_empty_trace_is_kept() -> None:
    assert bound(trace_of([]), gpu(), Budget(0)).seconds == 0


def test_what_no_plan_fits_names_the_op_and_the_bytes() -> None:
    trace = trace_of([1, 1, 1, 1], [(4, 0, 3), (3, 1, 3)])
    found = bound(trace, gpu(), Budget(6))
    assert (found.status, found.op, found.needed_bytes) == ("infeasible", 3, 7)
    assert not found.feasible
    assert found.seconds == math.inf


def test_a_machine_without_tiers_can_only_keep() -> None:
    trace = trace_of([1, 1, 1, 1], [(4, 0, 3)])
    assert not bound(trace, machine(), Budget(3)).feasible


@pytest.mark.parametrize(("device", "host_s"), [("cuda", 0.0), ("cpu", 0.0), ("cpu", 1.0)])
def test_the_bound_is_tight_for_one_value(device: str, host_s: float) -> None:
    trace = trace_of([1, 2, 1, 1, 1], [(5, 0, 4), (5, 2, 3)], host_s=host_s, device=device)
    hardware, tier = (gpu(), Tier.HOST) if device == "cuda" else (cpu(), Tier.DISK)
    best = simulate(trace, hardware, plan_of(trace, Offload(tier, 0, 2, 4, 4)))
    found = bound(trace, hardware, Budget(5))
    assert found.status == "optimal"
    assert found.seconds == pytest.approx(best.seconds, rel=1e-5)
    assert found.gap(best.seconds) == pytest.approx(0, abs=1e-5)


def test_both_directions_at_once_share_the_path() -> None:
    # There is room for one value. Before op 4, value 1 must leave and value 0 come back.
    trace = trace_of([1] * 7, [(5, 0, 4), (5, 2, 6)])
    apart, shared, in_turns = (bound(trace, gpu(d), Budget(5)).seconds for d in (1.0, 0.8, 0.4))
    real = plan_of(trace, Offload(Tier.HOST, 0, 2, 4, 4), Offload(Tier.HOST, 2, 4, 5, 6))
    assert in_turns == pytest.approx(simulate(trace, gpu(), real).seconds, rel=1e-5)
    # Value 0 can come in from the end of op 3 while the rest of value 1 goes out.
    assert apart == pytest.approx(in_turns - 4, rel=1e-5)
    assert apart < shared < in_turns


def test_four_hundred_values_take_seconds_at_most() -> None:
    trace = strategies.random_trace(1, 1200, device="cpu")
    hardware = strategies.machine(
        "cpu", link_rate=1e9, disk=True, disk_rate=2e9, allocator=Allocator(512, 0.0, 0)
    )
    keep = simulate(trace, hardware, plan_of(trace))
    began = time.perf_counter()
    found = bound(trace, hardware, Budget(keep.peak(Tier.DEVICE) // 3))
    assert time.perf_counter() - began < 10
    assert found.status == "optimal"
    assert found.stall_seconds > 0


def test_where_the_solver_runs_out_of_time_it_is_asked_for_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = strategies.random_trace(1, 200)
    allocator = Allocator(512, 0.0, 0)
    hardware = strategies.machine(
        "cuda", link_rate=1e9, disk=False, disk_rate=1.0, allocator=allocator
    )
    budget = Budget(simulate(trace, hardware, plan_of(trace)).peak(Tier.DEVICE) // 2)
    full, coarse = (bound(trace, hardware, budget, samples=count) for count in (32, 8))
    assert full.segments > coarse.segments
    assert full.seconds >= coarse.seconds * (1 - 1e-5)
    solve = bounds._solve

    def in_time(problem: Relaxation, keep_seconds: float, limit_s: float) -> tuple[float, str]:
        if len(problem.bounds) > limit:
            return keep_seconds, "out of time"
        return solve(problem, keep_seconds, limit_s)

    sizes: list[int] = []

    def noted(problem: Relaxation, *given: float) -> tuple[float, str]:
        sizes.append(len(problem.bounds))
        return solve(problem, *given)

    monkeypatch.setattr(bounds, "_solve", noted)
    bound(trace, hardware, budget, samples=8)
    (limit,) = sizes
    monkeypatch.setattr(bounds, "_solve", in_time)
    assert bound(trace, hardware, budget) == coarse
    limit = 0
    found = bound(trace, hardware, budget)
    assert (found.status, found.stall_seconds) == ("out of time", 0.0)


def test_without_scipy_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(
        name: str,
        globals_: Mapping[str, object] | None = None,
        locals_: Mapping[str, object] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        if name.startswith("scipy"):
            raise ImportError(name)
        return real(name, globals_, locals_, fromlist, level)

    monkeypatch.setattr(builtins, "__import__", missing)
    trace = trace_of([1, 2, 1, 1, 1], [(5, 0, 4), (3, 2, 3)])
    with pytest.raises(MissingExtraError, match=r"belady\[solver\]"):
        bound(trace, gpu(), Budget(5))
