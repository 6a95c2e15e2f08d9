"""The founders' claims, their machines, and what is simulated on them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from belady.ir.legality import check
from belady.ir.plan import Budget
from belady.planners import POLICIES, plan, traits_of
from belady.planners.tvdnn_greedy import TVDNN_GREEDY
from belady.units import parse_bytes
from benchmarks import records
from benchmarks.cases import SIMULATED
from benchmarks.founders import printed, simulated, verb
from benchmarks.founders.claim import Claim, Net
from benchmarks.founders.claims import CLAIMS
from benchmarks.founders.iterations import ORDERED, PLAIN, Iteration
from benchmarks.founders.machines import MACHINES
from benchmarks.founders.simulated import FOUNDERS, _planned, wanted
from benchmarks.founders.table import _measured, table
from benchmarks.founders.traces import flops, observed_on, slowed, static
from benchmarks.workloads import WORKLOADS
from tests.benchmarks.test_workloads import toy

ALEXNET = Net("alexnet", 128)


@pytest.fixture(scope="module", autouse=True)
def no_numbers() -> Iterator[None]:
    """Of networks and images at full size only shapes are asked, and drawing them takes long."""

    def left(tensor: Tensor, *_: object, **__: object) -> Tensor:
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", torch.empty)
        for name in ("kaiming_uniform_", "kaiming_normal_", "normal_", "uniform_"):
            patch.setattr(nn.init, name, left)
        yield


@pytest.fixture(scope="module")
def alexnet() -> Iteration:
    return Iteration("Titan X", ALEXNET)


def test_claims_name_what_is_there() -> None:
    for claim in CLAIMS:
        assert not claim.nets or claim.machine in MACHINES
        assert claim.policy in FOUNDERS
        for net in claim.nets:
            assert net.workload in WORKLOADS
            assert net.in_core < net.batch
            memory = MACHINES[claim.machine].device_bytes
            assert not net.memory or parse_bytes(net.memory) < memory
    assert set(FOUNDERS) <= set(POLICIES)


def test_a_prediction_that_differs_from_what_was_printed_says_why() -> None:
    plans = [record for record in records.committed() if record.get("group") == SIMULATED]
    for claim in CLAIMS:
        differing = [net for net in claim.nets if printed.differs(claim, net, plans)]
        assert claim.why or (claim.nets and not differing), claim.published


def test_what_is_near_needs_no_reason() -> None:
    net = Net("alexnet", 128, seconds=1.0, overhead=0.2)
    claim = Claim("", "", "", "", "Titan X", (net,), policy="vdnn_all")
    record = {"machine": "Titan X", "workload": "alexnet", "batch": 128, "budget": "machine"}
    record |= {"method": "belady:vdnn_all", "oracle_seconds": 1.0, "outcome": "simulated"}
    nominal = record | {"speed": "nominal", "simulated_seconds": 2.0}
    at_its_speed = record | {"speed": "printed", "simulated_seconds": 1.16}
    assert printed.differs(claim, net, [])
    assert printed.differs(claim, net, [nominal])
    assert not printed.differs(claim, net, [nominal, at_its_speed])
    assert printed.differs(claim, net, [nominal | {"outcome": "infeasible"}])
    assert printed.differs(claim, net, [nominal, at_its_speed | {"simulated_seconds": 1.1}])


def test_ours_is_measured_at_the_batch_of_the_claim() -> None:
    about = {"workload": "vgg19", "precision": "fp32", "outcome": "ok", "peak_allocated_bytes": 0}
    about |= {"device_name": "a device", "torch": "2"}
    plain = {**about, "method": "plain", "budget": "none", "median_seconds": 1.0}
    ours = {**about, "method": "belady:auto", "budget": "4GiB", "median_seconds": 1.5}
    at = {"sizes": {"batch": 64}}
    found = [plain, ours, plain | at, ours | at | {"median_seconds": 3.0}]
    assert "+50.0% time" in _measured(Net("vgg19", 256), found)
    assert "+200.0% time" in _measured(Net("vgg19", 64), found)
    assert _measured(Net("vgg19", 32), found) == "not at this batch, but at 64, 256"
    assert _measured(Net("vgg16", 256), found) == "not measured beside plain"
    deeper = [it | {"sizes": {"depth": 16}} for it in (plain, ours)]
    elsewhere = [plain | {"device_name": "another"}, ours]
    for other in (deeper, elsewhere):
        assert _measured(Net("vgg19", 256), other) == "not measured beside plain"
    flushed = ours | {"allocation_retries": 3}
    assert "flushes: 3" in _measured(Net("vgg19", 256), [plain, flushed])


def test_every_plan_has_a_name_of_its_own() -> None:
    names = [verb._key(name) for it in verb.experiments() for name in wanted(*it)]
    assert len(set(names)) == len(names) > 500


@pytest.mark.parametrize("name", ["vgg19", "resnet50", "googlenet"])
def test_a_trace_of_another_machine_is_a_trace(name: str) -> None:
    machine = MACHINES["Titan X"]
    work = toy(name)
    trace = observed_on(machine, static(work), flops(work))
    hardware = machine.profile()
    budget = Budget(machine.device_bytes)
    made = plan("auto", trace, hardware, budget)
    assert check(trace, hardware, made, budget).problems == ()
    assert all(op.device_seconds >= 0 for op in trace.ops)
    assert sum(op.device_seconds for op in trace.ops) > 0


def test_twice_the_rate_is_at_most_twice_as_fast() -> None:
    work = toy("vgg19")
    trace, counted = static(work), flops(work)
    slow, fast = (
        sum(op.device_seconds for op in observed_on(MACHINES[name], trace, counted).ops)
        for name in ("Titan X", "V100")
    )
    assert fast < slow < fast * 336 / 900 * 10


def test_views_take_no_time_and_bytes_count_on_both_sides(alexnet: Iteration) -> None:
    trace = alexnet.plain.trace
    views = [op for op in trace.ops if not op.writes]
    assert views
    assert {op.device_seconds for op in views} == {0.0}
    relu = next(op for op in trace.ops if op.name == "aten.relu_.default")
    (nbytes,) = (trace.storages[trace.values[value].storage].nbytes for value in relu.reads)
    assert relu.device_seconds == pytest.approx(2 * nbytes / MACHINES["Titan X"].bytes_per_s)


def test_a_slower_machine_does_the_same(alexnet: Iteration) -> None:
    fast = alexnet.plain.trace
    slow = slowed(fast, 3.0)
    seconds = [sum(op.device_seconds for op in trace.ops) for trace in (fast, slow)]
    assert seconds[1] == pytest.approx(3 * seconds[0])
    assert slow.values == fast.values


def test_policies_run_as_the_engine_would_have_them(alexnet: Iteration) -> None:
    ways = {name: [way.how for way in alexnet.ways(name, None)] for name in FOUNDERS}
    assert ways["layrub_hybrid"] == ways["layrub_intra"] == [ORDERED]
    assert ways["auto"] == [PLAIN, ORDERED]
    assert ways["vdnn_all"] == ways["layrub_inter"] == ways["tvdnn_ilp"] == [PLAIN]
    assert alexnet.plain.trace.fingerprint != alexnet.ordered.trace.fingerprint


def test_slices_fit_where_whole_modules_do_not() -> None:
    it = Iteration("Titan X", Net("vgg16", 32))
    whole = _planned(it, TVDNN_GREEDY, None)
    found = _planned(it, TVDNN_GREEDY, int(whole["budget_bytes"] * 0.9))
    assert (whole["outcome"], found["outcome"]) == ("simulated", "simulated")
    assert found["peak_bytes"] <= found["budget_bytes"] < whole["peak_bytes"]
    assert "slices" in found["way"]
    assert _planned(it, POLICIES["layrub_hybrid"], found["budget_bytes"])["outcome"] == "infeasible"


def test_slices_are_those_that_a_policy_needs() -> None:
    it = Iteration("Titan X", Net("vgg16", 32))
    nbytes = int(_planned(it, TVDNN_GREEDY, None)["budget_bytes"] * 0.9)
    found = {name: _planned(it, POLICIES[name], nbytes) for name in ("vdnn_all", "tvdnn_greedy")}
    assert {each["outcome"] for each in found.values()} == {"simulated"}
    # What vDNN's leaves on the device the floor does not.
    assert found["vdnn_all"]["way"] != found["tvdnn_greedy"]["way"]


def test_pages_fault_on_pascal_and_volta_alone() -> None:
    managed = {name for name, it in MACHINES.items() if it.profile().managed is not None}
    assert managed == {"P100", "V100"}
    policies = {
        machine: {name["method"].removeprefix("belady:") for name in wanted(machine, ALEXNET)}
        for machine in MACHINES
    }
    for machine, asked in policies.items():
        assert asked == set(FOUNDERS) - (
            set() if machine in managed else {it for it in FOUNDERS if traits_of(it).managed}
        )


def test_ocdnn_moves_at_the_share_of_memory_that_the_paper_had() -> None:
    net = Net("alexnet", 1200, seconds=1.0, in_core=1100)
    plans = [
        name
        for name in wanted("V100", net)
        if name["budget"] == "share" and name["method"] == "belady:ocdnn_naive"
    ]
    nominal, at_its_speed, held = simulated.simulated("V100", net, plans, 1.0)
    assert nominal["budget_bytes"] < nominal["baseline_peak_bytes"]
    moved = {lane: nbytes for lane, nbytes, _ in nominal["moved"]}
    assert moved["copy-out"] == moved["copy-in"] > 0
    # Compute waits for all that moves: by prefetch out, by faults back.
    waits = moved["copy-out"] / 10.9e9 + moved["copy-in"] / 5.4e9
    assert nominal["stall_seconds"] == pytest.approx(waits, rel=0.01)
    assert at_its_speed["oracle_seconds"] == pytest.approx(1.0)
    assert at_its_speed["stall_seconds"] == pytest.approx(waits, rel=0.01)
    heavier = MACHINES["V100"].device_bytes / held["budget_bytes"]
    assert held["stall_seconds"] == pytest.approx(heavier * waits, rel=0.01)


def test_what_is_there_is_not_simulated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    net = Net("alexnet", 128, "0.9GB", seconds=1.0)
    monkeypatch.setattr(simulated, "FOUNDERS", ("vdnn_all", "layrub_hybrid", "auto"))
    monkeypatch.setattr(verb, "experiments", lambda: iter([("Titan X", net)]))
    out = tmp_path / "out.jsonl"
    chosen = Namespace(out=out, workload=None, machine=["Titan X"], limit_s=0, ilp_limit_s=1)
    verb.run(chosen)
    assert len(records.read(out)) == 1
    assert "goes on from here" in capsys.readouterr().out
    chosen.limit_s = 60
    verb.run(chosen)
    verb.run(chosen)
    found = records.read(out)
    assert [verb._key(r) for r in found] == [verb._key(name) for name in wanted("Titan X", net)]
    timed = [r for r in found if r["speed"] == "printed"]
    assert all(r["oracle_seconds"] == pytest.approx(1.0) for r in timed)
    shown = table(found)
    assert "**alexnet, batch 128, Titan X**" in shown
    assert "| vdnn_all |" in shown
    assert "does not fit" in shown
