from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belady.errors import InfeasibleBudgetError, PlanMismatchError
from belady.ir.hardware import Allocator, HardwareProfile
from belady.ir.legality import Verdict, check, require
from belady.ir.plan import (
    Assignment,
    Budget,
    Decision,
    Encode,
    Keep,
    Managed,
    Offload,
    OrderEdit,
    Section,
)
from belady.ir.trace import Storage, StorageKind, Tier, Trace, Value
from belady.simulate.engine import simulate
from tests.support.strategies import instances, machine
from tests.unit.ir.engine import Engine
from tests.unit.ir.moments import (
    BYTES,
    CPU,
    GPU,
    ROOMY,
    drawn,
    drawn_moves,
    plan_of,
    save,
    trace_of,
    transient,
    without_link,
)

MOVE = Offload(Tier.HOST, 0, 2, 6, 6)


def one_value(*, released: int = 2, nbytes: int = 100, reads: tuple[int, ...] = (6,)) -> Trace:
    value = Value(0, 0, 0, (), (save(1, reads, 7),))
    # Something else is saved at each boundary, so that the engine can act there.
    other = Value(1, 0, 0, (), tuple(save(b, (), 8, b) for b in range(2, 8)))
    return trace_of(8, [transient(nbytes, 0, released, 7), transient(1, 0, 8, 8)], [value, other])


def one_mask() -> Trace:
    """A value of bools that a comparison makes, in an iteration that is followed."""
    trace = one_value()
    ops = (replace(trace.ops[0], name="aten.gt.Scalar", replayable=True), *trace.ops[1:])
    saves = tuple(replace(it, dtype="bool") for it in trace.values[0].saves)
    values = (replace(trace.values[0], saves=saves), *trace.values[1:])
    return replace(trace, ops=ops, values=values)


def judged(
    trace: Trace, decision: Decision, hardware: HardwareProfile = GPU, budget: Budget = ROOMY
) -> Verdict:
    return check(trace, hardware, plan_of(trace, {0: decision}), budget)


def messages(verdict: Verdict) -> str:
    return "\n".join(problem.message for problem in verdict.problems)


def test_a_good_move_is_legal() -> None:
    verdict = judged(one_value(), MOVE)
    assert verdict.ok
    assert (verdict.peak_bytes, verdict.host_bytes, verdict.disk_bytes) == (101, 100, 0)


@settings(max_examples=500, deadline=None)
@given(st.randoms(use_true_random=False))
def test_peaks_are_those_of_the_engine(rng: random.Random) -> None:
    trace = drawn(rng)
    moves: dict[int, Decision] = {
        v: d for v, d in drawn_moves(rng, trace).items() if judged_alone(trace, v, d).ok
    }
    verdict = check(trace, GPU, plan_of(trace, moves), ROOMY)
    assert verdict.ok
    engine = Engine(trace, plan_of(trace, moves)).run()
    peaks = {tier: max(held[tier] for held in engine.held) for tier in Tier}
    assert verdict.host_bytes == peaks[Tier.HOST]
    assert verdict.disk_bytes == peaks[Tier.DISK]
    assert verdict.peak_bytes >= peaks[Tier.DEVICE]
    if all(len({bool(s.reads) for s in trace.values[v].saves}) == 1 for v in moves):
        assert verdict.peak_bytes == peaks[Tier.DEVICE]
        assert engine.held[verdict.peak_op][Tier.DEVICE] == verdict.peak_bytes


def judged_alone(trace: Trace, value: int, decision: Decision) -> Verdict:
    return check(trace, GPU, plan_of(trace, {value: decision}), ROOMY)


@settings(max_examples=500, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_move_is_refused_that_frees_nothing_for_any_op(rng: random.Random) -> None:
    trace = drawn(rng)
    for index, move in drawn_moves(rng, trace).items():
        alone = [v for v in trace.saved if trace.values[v].storage == trace.values[index].storage]
        if len(alone) > 1:
            continue
        engine = Engine(trace, plan_of(trace, {index: move})).run()
        freed = any(index in off for off in engine.off)
        verdict = judged_alone(trace, index, move)
        assert verdict.ok == freed
        if not freed:
            assert "off the device for no op" in messages(verdict)
            assert verdict.problems[0].value == index


@settings(max_examples=200, deadline=None)
@given(instances(max_ops=8), st.randoms(use_true_random=False), st.integers(0, 5))
def test_what_is_legal_can_be_simulated(
    case: tuple[Trace, HardwareProfile], rng: random.Random, cut: int
) -> None:
    trace, hardware = case
    hardware = replace(hardware, links=hardware.links[cut:])
    plan = plan_of(trace, drawn_moves(rng, trace))
    if check(trace, hardware, plan, ROOMY).ok:
        simulate(trace, hardware, plan)


@pytest.mark.parametrize(
    ("trace", "move"),
    [
        (one_value(), replace(MOVE, free_at=6)),
        (one_value(), replace(MOVE, copy_in_at=2)),
        (one_value(released=6), MOVE),
        (one_value(released=8), MOVE),
        (one_value(nbytes=0), MOVE),
    ],
    ids=["freed at the read", "back at once", "held till the read", "held longer", "no bytes"],
)
def test_a_useless_move_is_named(trace: Trace, move: Offload) -> None:
    (problem,) = judged(trace, move).problems
    assert problem.value == 0
    assert "value 0: its bytes would be off the device for no op: gone at" in problem.message


def test_a_move_whose_bytes_stay_because_no_anchor_comes_is_named() -> None:
    value = Value(0, 0, 0, (), (save(1, (6,), 7),))
    trace = trace_of(8, [transient(100, 0, 2, 7)], [value])
    assert not judged(trace, Offload(Tier.HOST, 0, 3, 5, 6)).ok
    assert judged(trace, Offload(Tier.HOST, 0, 1, 5, 6)).ok


@pytest.mark.parametrize(
    "move",
    [
        replace(MOVE, copy_out_after=-1),
        replace(MOVE, free_at=0),
        replace(MOVE, copy_in_at=1),
        replace(MOVE, ready_by=5),
        replace(MOVE, ready_by=7),
    ],
)
def test_boundaries_must_not_decrease(move: Offload) -> None:
    (problem,) = judged(one_value(), move).problems
    assert "these must not decrease" in problem.message
    assert "saved at 1" in problem.message
    assert problem.value == 0


@pytest.mark.parametrize(("encode", "decode"), [(0, 6), (3, 2), (1, 7)])
def test_an_encoding_lies_between_save_and_read(encode: int, decode: int) -> None:
    verdict = judged(one_mask(), Encode("bits", 13, encode, decode))
    assert f"encoded at {encode} and decoded at {decode}" in messages(verdict)
    assert judged(one_mask(), Encode("bits", 13, 1, 6)).ok


@pytest.mark.parametrize("decision", [Encode("bits", 12, 1, 6), Encode("sign", 13, 1, 6)])
def test_an_encoding_is_one_that_gives_back_what_is_asked_for(decision: Encode) -> None:
    assert "no encoding" in messages(judged(one_value(), decision))
    assert "is 'bits' in 13 bytes" in messages(judged(one_mask(), decision))


@pytest.mark.parametrize("kind", [StorageKind.PARAMETER, StorageKind.BUFFER])
def test_what_is_persistent_stays(kind: StorageKind) -> None:
    trace = one_value()
    kept = Storage("cuda:0", 100, kind, 0, 8, 8, Tier.DEVICE)
    trace = replace(trace, storages=(kept, *trace.storages[1:]))
    assert messages(judged(trace, MOVE)) == f"value 0 is a {kind.value} and cannot move"


def test_what_is_never_saved_stays() -> None:
    trace = trace_of(4, [transient(10, 0, 2, 2)], [Value(0, 0, 0)])
    assert messages(judged(trace, MOVE)) == "value 0 is never saved, so it cannot move"


def test_managed_memory_is_for_machines_that_have_it() -> None:
    trace = one_value()
    plan = plan_of(trace, {0: Managed(2, 3, 5, 6)})
    assert check(trace, GPU, plan, ROOMY).ok
    without = check(trace, replace(GPU, managed=None), plan, ROOMY)
    assert messages(without) == (
        "value 0: the profile of machine 'drawn cuda' has no links of managed memory, which the "
        "probe measures on a CUDA device that may share it with the host (concurrentManagedAccess)"
    )
    cpu = replace(GPU, managed=None, device="cpu")
    assert cpu.no_managed == (
        "machine 'drawn cuda' is a CPU, and managed memory takes a CUDA device"
    )


def test_managed_moments_may_not_decrease() -> None:
    trace = one_value()
    said = messages(check(trace, GPU, plan_of(trace, {0: Managed(4, 3, 5, 6)}), ROOMY))
    assert said.startswith("value 0: saved at ")
    assert "copied out at 4, freed at 3" in said


def test_pages_that_fault_in_are_not_asked_for() -> None:
    trace = one_value()
    assert check(trace, GPU, plan_of(trace, {0: Managed(2, 2, 6, 6, faults=True)}), ROOMY).ok
    early = check(trace, GPU, plan_of(trace, {0: Managed(2, 2, 5, 6, faults=True)}), ROOMY)
    assert messages(early) == (
        "value 0: its pages fault in when they are read, at 6, so nothing can be issued at 5"
    )


def test_edits_without_an_engine_are_named() -> None:
    trace = one_value()
    plan = replace(
        plan_of(trace, {}),
        sections=(Section(("layer",), 2),),
        order_edits=(OrderEdit(1, 0),),
        reuse_classes=((0, 1),),
    )
    found = messages(check(trace, GPU, plan, ROOMY))
    for name in ("sections", "order_edits", "reuse_classes"):
        assert f"no engine carries out {name} yet" in found


def test_unknown_names_are_named() -> None:
    trace = one_value()
    twice = (Assignment(0, Keep()), Assignment(0, Keep()), Assignment(9, Keep()))
    plan = replace(plan_of(trace, {}), assignments=twice, layer_algorithms=((3, "winograd"),))
    assert messages(check(trace, GPU, plan, ROOMY)).splitlines() == [
        "value 0 has two decisions",
        "value 9 does not exist: the trace has 2",
        "op 3 has no algorithm 'winograd'",
    ]


def test_a_plan_for_another_trace_is_refused() -> None:
    plan = replace(plan_of(one_value(), {}), trace="0" * 16)
    with pytest.raises(PlanMismatchError, match="this plan is for trace 0000000000000000"):
        check(one_value(), GPU, plan, ROOMY)


@pytest.mark.parametrize(
    ("hardware", "tier", "ends"),
    [
        (without_link(GPU, Tier.DEVICE, Tier.HOST), Tier.HOST, ("device", "host")),
        (without_link(GPU, Tier.HOST, Tier.DEVICE), Tier.HOST, ("host", "device")),
        (without_link(GPU, Tier.HOST, Tier.DISK), Tier.DISK, ("host", "disk")),
        (without_link(GPU, Tier.DISK, Tier.HOST), Tier.DISK, ("disk", "host")),
        (without_link(GPU, Tier.HOST, Tier.DEVICE), Tier.DISK, ("host", "device")),
        (without_link(CPU, Tier.DEVICE, Tier.DISK), Tier.DISK, ("device", "disk")),
        (without_link(CPU, Tier.DISK, Tier.DEVICE), Tier.DISK, ("disk", "device")),
    ],
)
def test_a_missing_link_is_named(
    hardware: HardwareProfile, tier: Tier, ends: tuple[str, str]
) -> None:
    found = messages(judged(one_value(), replace(MOVE, tier=tier), hardware))
    assert found == f"value 0: machine {hardware.name!r} has no link from {ends[0]} to {ends[1]}"


@pytest.mark.parametrize(
    ("hardware", "tier", "message"),
    [
        (CPU, Tier.HOST, "value 0: machine 'drawn cpu' has no tier host"),
        (GPU, Tier.DEVICE, "value 0: offload to the device itself"),
    ],
)
def test_a_missing_tier_is_named(hardware: HardwareProfile, tier: Tier, message: str) -> None:
    assert messages(judged(one_value(), replace(MOVE, tier=tier), hardware)) == message


def test_no_room_in_another_tier() -> None:
    verdict = judged(one_value(), MOVE, budget=Budget(1 << 60, host_bytes=99))
    (problem,) = verdict.problems
    assert problem.message == "the plan holds 100 bytes in tier host, which has room for 99"
    assert problem.nbytes == 1
    disk = judged(one_value(), replace(MOVE, tier=Tier.DISK), budget=Budget(1 << 60, 0, 10))
    assert disk.problems[0].nbytes == 90


def test_over_budget_names_op_and_bytes() -> None:
    hardware = machine(
        "cuda", link_rate=1e10, disk=True, disk_rate=1e9, allocator=Allocator(512, 0.0, 1000)
    )
    trace = one_value()
    plan = replace(plan_of(trace, {0: MOVE}), budget=Budget(2000))
    verdict = check(trace, hardware, plan, plan.budget)
    (problem,) = verdict.problems
    assert (problem.op, problem.nbytes) == (0, 24)
    assert "op 0 op0 in module 'layer' (forward) holds 1024 bytes at the peak" in problem.message
    with pytest.raises(InfeasibleBudgetError) as refused:
        require(trace, hardware, plan, 2024)
    it = refused.value
    assert (it.needed_bytes, it.budget_bytes, it.smallest_bytes) == (2024, 2000, 2024)
    assert require(trace, hardware, replace(plan, budget=Budget(2024)), 0).ok


def test_require_names_everything_else() -> None:
    trace = one_value()
    plan = plan_of(trace, {0: replace(MOVE, free_at=6)})
    with pytest.raises(PlanMismatchError, match="off the device for no op"):
        require(trace, GPU, plan, 0)


def test_an_empty_trace_needs_nothing() -> None:
    trace = trace_of(0, [], [])
    verdict = check(trace, replace(GPU, allocator=BYTES), plan_of(trace, {}), Budget(0))
    assert verdict.ok
    assert verdict.peak_bytes == 0
