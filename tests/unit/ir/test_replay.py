"""What may be recomputed: every rule, each broken by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from belady.ir import replay
from belady.ir.legality import check
from belady.ir.ops import Replay
from belady.ir.plan import Decision, Encode, Offload, Recompute
from belady.ir.replay import reasons, sources
from belady.ir.residency import times_saved
from belady.ir.trace import Phase, Save, StorageKind, Tier, Trace, Value
from tests.support.builder import OpSpec, build_trace
from tests.unit.ir.moments import GPU, ROOMY, plan_of

# Ops 0 to 4 forward, 5 to 9 backward; op i of forward writes value of(i), saved by op i + 1.
COUNT = 5
AGAIN = Recompute((2,), 6)


def chain(**specs: Any) -> Trace:
    """Layers of which 1 to 3 can be replayed; each saves what it reads, and a weight."""
    layers = [
        OpSpec(replayable=0 < index < 4, parameter_bytes=16, **specs) for index in range(COUNT)
    ]
    return build_trace(layers)


def of(trace: Trace, op: int) -> int:
    """Value that op ``op`` writes."""
    return trace.ops[op].writes[0]


def with_op(trace: Trace, index: int, **changes: Any) -> Trace:
    ops = list(trace.ops)
    ops[index] = replace(ops[index], **changes)
    return replace(trace, ops=tuple(ops))


def with_value(trace: Trace, index: int, **changes: Any) -> Trace:
    values = list(trace.values)
    values[index] = replace(values[index], **changes)
    return replace(trace, values=tuple(values))


def with_storage(trace: Trace, index: int, **changes: Any) -> Trace:
    storages = list(trace.storages)
    at = trace.values[index].storage
    storages[at] = replace(storages[at], **changes)
    return replace(trace, storages=tuple(storages))


def with_save(trace: Trace, index: int, **changes: Any) -> Trace:
    (save,) = trace.values[index].saves
    return with_value(trace, index, saves=(replace(save, **changes),))


def masked(trace: Trace) -> Trace:
    """The trace with a comparison as op 1, whose result can be held in bits."""
    named = with_op(trace, 1, name="aten.gt.Scalar")
    return with_save(named, of(trace, 1), dtype="bool")


def refused(trace: Trace, decision: Decision = AGAIN, **others: Decision) -> list[str]:
    """What is wrong with recomputing what op 2 writes; ``others`` are decisions by ``op<i>``."""
    decisions = {of(trace, int(name[2:])): it for name, it in others.items()}
    value = of(trace, 2)
    verdict = check(trace, GPU, plan_of(trace, {value: decision, **decisions}), ROOMY)
    assert all(problem.value == value for problem in verdict.problems)
    return [it.message.removeprefix(f"value {value}: ") for it in verdict.problems]


def test_a_replay_from_saved_values_and_parameters_is_legal() -> None:
    trace = chain()
    assert refused(trace) == []
    weight, source = trace.ops[2].reads[1], of(trace, 1)
    assert trace.storages[trace.values[weight].storage].kind is StorageKind.PARAMETER
    assert sources(trace, AGAIN) == (source, weight)
    assert sources(trace, Recompute((1, 2), 6))[0] == of(trace, 0)


def test_a_replay_may_go_further_back_than_it_must() -> None:
    assert refused(chain(), Recompute((1, 2), 6)) == []


def test_it_happens_at_the_first_read_or_before_it() -> None:
    trace = chain()
    assert refused(trace, Recompute((2,), 5)) == []
    assert refused(trace, Recompute((2,), 7)) == ["recomputed at 7, but backward reads it at 6"]
    never = with_save(trace, of(trace, 2), reads=())
    assert refused(never) == ["recomputed at 6, but backward never reads it"]


def again(save: Save, packed: int, dropped: int) -> Save:
    return replace(save, ordinal=99, packed=packed, reads=(), dropped=dropped)


def test_the_storage_holds_no_other_saved_value() -> None:
    trace = chain()
    other = of(trace, 4)
    saves = (again(trace.values[of(trace, 2)].saves[0], 5, 7),)
    storage = trace.values[of(trace, 2)].storage
    shared = with_value(trace, other, storage=storage, version=1, saves=saves)
    assert refused(shared)[0] == (
        f"value {other} of its storage is saved too and would not come back with it"
    )


def test_it_is_saved_once_and_for_all() -> None:
    trace = chain()
    (save,) = trace.values[of(trace, 2)].saves
    assert (save.packed, save.dropped) == (3, 7)
    twice = with_value(trace, of(trace, 2), saves=(save, again(save, 7, 8)))
    assert refused(twice) == ["it is let go at 7 and saved again"]
    longer = with_value(trace, of(trace, 2), saves=(save, again(save, 4, 6)))
    assert refused(longer) == []


@pytest.mark.parametrize("changes", [{"released": 6}, {"released": 8, "death": 8}, {"nbytes": 0}])
def test_it_frees_bytes(changes: dict[str, int]) -> None:
    trace = chain()
    released = changes.get("released", 4)
    assert refused(with_storage(trace, of(trace, 2), **changes)) == [
        f"its bytes would be off the device for no op: gone at {released}, back at 6"
    ]


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ((), "there is no op to replay"),
        ((99,), "op 99 does not exist: the trace has 10"),
        ((-1, 2), "op -1 does not exist: the trace has 10"),
        ((2, 1), "the ops [2, 1] are not in ascending order"),
        ((2, 2), "the ops [2, 2] are not in ascending order"),
        ((1,), "op 1 layer in module 'layer1' (forward) is replayed last and does not write it"),
    ],
)
def test_the_ops_end_with_what_writes_it(ops: tuple[int, ...], message: str) -> None:
    assert refused(chain(), Recompute(ops, 6))[0] == message


def test_the_ops_come_before_the_replay() -> None:
    trace = chain()
    late = with_op(with_op(trace, 2, writes=()), 7, writes=(of(trace, 2),))
    verdict = check(late, GPU, plan_of(late, {of(trace, 2): Recompute((7,), 6)}), ROOMY)
    assert "op 7 layer_backward in module 'layer2' (backward) comes only after boundary 6" in (
        verdict.problems[0].message
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"phase": Phase.BACKWARD}, "is of phase backward"),
        ({"phase": Phase.OPTIMIZER}, "is of phase optimizer"),
        ({"communicates": True}, "communicates"),
        ({"random": True}, "draws random numbers"),
        ({"replayable": False}, "is not replayable"),
    ],
)
def test_every_op_can_run_again(changes: dict[str, Any], why: str) -> None:
    trace = with_op(chain(), 1, **changes)
    assert refused(trace, Recompute((1, 2), 6)) == [
        f"{trace.locate(1)} cannot be replayed: it {why}"
    ]
    assert refused(trace) == []


def test_what_a_random_op_has_drawn_is_enough_to_make_its_result_again() -> None:
    trace = chain()
    short = Replay(0.5, trace.ops[1].reads, trace.ops[1].writes)
    assert refused(with_op(trace, 1, random=True, shortcut=short), Recompute((1, 2), 6)) == []


def test_ops_of_the_loss_can_run_again() -> None:
    assert refused(with_op(chain(), 2, phase=Phase.LOSS)) == []


def test_nothing_that_lasts_is_written() -> None:
    trace = chain()
    statistics = trace.ops[3].reads[1]
    trace = with_storage(trace, statistics, kind=StorageKind.BUFFER)
    trace = with_op(trace, 2, writes=(*trace.ops[2].writes, statistics))
    assert refused(trace) == [
        f"{trace.locate(2)} cannot be replayed: it writes value {statistics}, a buffer"
    ]


def in_place() -> Trace:
    """Layer 2 overwrites what layer 1 wrote, and layer 3 saves it."""
    specs = [OpSpec(replayable=0 < index < 4, in_place=index == 2) for index in range(COUNT)]
    trace = build_trace(specs)
    assert trace.values[of(trace, 2)].storage == trace.values[of(trace, 1)].storage
    return trace


def test_what_is_overwritten_was_written_by_the_replay() -> None:
    trace = in_place()
    assert refused(trace, Recompute((1, 2), 6)) == []
    before, place = of(trace, 1), trace.locate(2)
    assert refused(trace) == [
        f"{place} writes value {of(trace, 2)} over bytes that the replay has not written",
        f"{place} reads value {before}, which {place} overwrites before boundary 6",
    ]


def test_what_is_read_is_what_it_was() -> None:
    trace = chain()
    weight, gradient = trace.ops[2].reads[1], trace.ops[5].writes[-1]
    storage = trace.values[weight].storage
    # As an optimizer that steps in backward would.
    for writer, problems in ((5, 1), (6, 0)):
        stepped = with_value(trace, gradient, storage=storage, version=1, producer=writer)
        found = refused(stepped)
        assert len(found) == problems
        if found:
            assert found == [
                f"{trace.locate(2)} reads value {weight}, which {trace.locate(5)} overwrites "
                "before boundary 6"
            ]


def test_a_source_that_moves_within_autograd_is_what_it_was() -> None:
    trace = chain()
    source = of(trace, 1)
    storage = trace.values[source].storage
    other = with_value(trace, of(trace, 4), storage=storage, version=1)
    assert refused(other) == [
        f"{trace.locate(2)} reads value {source}, which {trace.locate(4)} overwrites before "
        "boundary 6"
    ]


def test_what_nobody_saves_is_no_source() -> None:
    trace = chain()
    source = of(trace, 1)
    held = with_storage(with_value(trace, source, saves=()), source, released=9, death=9)
    assert refused(held) == [
        f"{trace.locate(2)} reads value {source}, which autograd does not save"
    ]


@pytest.mark.parametrize(("dropped", "legal"), [(6, False), (7, True), (8, True)])
def test_a_source_is_held_as_long_as_the_value(dropped: int, legal: bool) -> None:
    trace = chain()
    source = of(trace, 1)
    found = refused(with_save(trace, source, reads=(5,), dropped=dropped))
    assert found == [
        f"{trace.locate(2)} reads value {source}, which autograd lets go at {dropped}, before it "
        f"is done with value {of(trace, 2)}"
    ] * (not legal)


def test_a_source_is_saved_before_the_value() -> None:
    trace = chain()
    source = of(trace, 1)
    late = with_save(trace, source, packed=4)
    assert refused(late) == [
        f"{trace.locate(2)} reads value {source}, which autograd saves only after value "
        f"{of(trace, 2)}"
    ]


def test_a_source_that_is_saved_often_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = chain()
    source = of(trace, 1)
    (save,) = trace.values[source].saves
    # As what all steps of a recurrent network read is.
    often = with_value(trace, source, saves=tuple(replace(save, ordinal=9 + i) for i in range(99)))
    looked_at: list[Value] = []

    def counted(value: Value) -> Iterator[tuple[int, int, list[int]]]:
        looked_at.append(value)
        return times_saved(value)

    monkeypatch.setattr(replay, "times_saved", counted)
    for _ in range(9):
        assert refused(often) == []
    assert looked_at.count(often.values[source]) == 1


def test_a_source_that_is_recomputed_too_is_made_again_by_then() -> None:
    trace = chain()
    found = refused(trace, op1=Recompute((1,), 7))
    assert found == [
        f"{trace.locate(2)} reads value {of(trace, 1)}, which is itself made again at 7 only, "
        "after boundary 6"
    ]
    assert refused(trace, op1=Recompute((1,), 6)) == []
    assert refused(trace, Recompute((1, 2), 6), op1=Recompute((1,), 7)) == []


def test_a_source_made_again_is_still_to_be_read() -> None:
    trace = chain()
    source, value = of(trace, 1), of(trace, 2)
    early = with_save(trace, source, reads=(5,))
    why = f"value {value}: {early.locate(2)} reads value {source}, which is read for the last time"
    plan = plan_of(early, {source: Recompute((1,), 5), value: AGAIN})
    assert [it.message for it in check(early, GPU, plan, ROOMY).problems] == [
        f"{why} before boundary 6, and then let go"
    ]


@pytest.mark.parametrize(
    ("decision", "why"),
    [
        (Offload(Tier.HOST, 1, 3, 6, 7), ""),
        (Offload(Tier.HOST, 1, 3, 5, 6), ""),
        (Offload(Tier.HOST, 1, 3, 7, 7), "comes back to the device at 7, after boundary 6"),
        (Encode("bits", 128, 2, 6), ""),
        (Encode("bits", 128, 2, 7), "is decoded at 7 only, after boundary 6"),
    ],
)
def test_a_source_is_on_the_device(decision: Decision, why: str) -> None:
    trace = masked(chain())
    source = of(trace, 1)
    found = refused(trace, op1=decision)
    assert found == [f"{trace.locate(2)} reads value {source}, which {why}"] * bool(why)


def test_nothing_starts_from_signs() -> None:
    trace = chain()
    decisions = {of(trace, 1): Encode("sign", 128, 2, 6), of(trace, 2): AGAIN}
    ((message, op),) = reasons(trace, of(trace, 2), decisions)
    assert op == 2
    assert message.endswith("which comes back as signs alone")


def test_an_encoded_source_is_still_to_be_read() -> None:
    trace = masked(chain())
    early = with_save(trace, of(trace, 1), reads=(5,))
    (message,) = refused(early, op1=Encode("bits", 128, 2, 5))
    assert message.endswith("is read for the last time before boundary 6, and then let go")


def test_a_source_that_has_been_read_for_the_last_time_may_be_gone() -> None:
    trace = chain()
    source = of(trace, 1)
    early = with_save(trace, source, reads=(5,))
    assert refused(early) == []
    assert refused(early, op1=Offload(Tier.HOST, 1, 3, 4, 4)) == [
        f"{trace.locate(2)} reads value {source}, which is read for the last time before "
        "boundary 6, and then let go"
    ]
