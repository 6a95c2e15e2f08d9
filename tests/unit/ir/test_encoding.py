"""What may be held in fewer bytes: every rule, each broken by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from belady.ir.codecs import PIECE, Encoding, Passes, passes
from belady.ir.encoding import encoding_of
from belady.ir.hardware import Allocator
from belady.ir.plan import Assignment, Budget, Encode, Plan
from belady.ir.scratch import scratch
from belady.ir.trace import (
    Mode,
    Need,
    Op,
    Phase,
    Save,
    Source,
    Storage,
    StorageKind,
    Trace,
    Use,
    Value,
)

POOL = "aten.max_pool2d_with_indices"
RELU, INDICES = 1, 2
# Elements of the ReLU's result, in bfloat16, and places in a plane of it.
ELEMENTS, PLANE = 2 * 3 * 40 * 50, 40 * 50


def op(name: str, reads: tuple[int, ...], writes: tuple[int, ...], **more: Any) -> Op:
    phase = Phase.BACKWARD if "backward" in name else Phase.FORWARD
    common = (phase, 0, Mode.NORMAL, 1e-3, 1e-6, 0)
    return Op(f"aten.{name}.default", "layer", *common, reads, writes, **more)


def save(of: int, boundaries: tuple[int, int], dtype: str, *, as_input: bool = False) -> Save:
    packed, read = boundaries
    shape = (2, 3, 40, 50) if dtype == "bfloat16" else (2, 3, 20, 25)
    common = (as_input, "layer", shape, (1,) * 4, 0, dtype)
    return Save(0, of, of, packed, (read,), read + 1, *common)


def net() -> Trace:
    """An op, a ReLU and a pooling, and their backward: ops 0, 1, 2 and 3, 4, 5."""
    sizes = [100, 2 * ELEMENTS, 8 * ELEMENTS // 4, ELEMENTS // 2, 100, 100, 100]
    storages = [
        Storage("cuda:0", sizes[0], StorageKind.ACTIVATION, 0, 2, 2),
        Storage("cuda:0", sizes[1], StorageKind.ACTIVATION, 1, 3, 5),
        Storage("cuda:0", sizes[2], StorageKind.ACTIVATION, 2, 3, 4),
        *(Storage("cuda:0", n, StorageKind.ACTIVATION, 2, 6, 6) for n in sizes[3:]),
    ]
    uses = (Use(2), Use(3, Need.SHAPE), Use(4, Need.SIGN))
    values = [
        Value(0, 0, 0, (Use(1),)),
        Value(
            *(1, 0, 1, uses),
            (save(1, (2, 4), "bfloat16"), save(2, (2, 3), "bfloat16", as_input=True)),
        ),
        Value(2, 0, 2, (Use(3),), (save(2, (3, 3), "int64"),)),
        *(Value(storage, 0, storage - 1) for storage in range(3, 7)),
    ]
    ops = [
        op("layer", (), (0,)),
        op("relu", (0,), (RELU,), replayable=True),
        op("max_pool2d_with_indices", (RELU,), (INDICES, 3)),
        op("max_pool2d_with_indices_backward", (RELU, INDICES), (4,)),
        op("threshold_backward", (RELU, 4), (5,)),
        op("layer_backward", (5,), (6,)),
    ]
    common = (Source.EAGER, "cuda", ("Net",))
    return Trace(*common, tuple(ops), tuple(storages), tuple(values), tuple(range(6)))


def with_op(trace: Trace, index: int, **changes: Any) -> Trace:
    ops = [replace(it, **changes) if i == index else it for i, it in enumerate(trace.ops)]
    return replace(trace, ops=tuple(ops))


def with_value(trace: Trace, index: int, **changes: Any) -> Trace:
    found = [replace(it, **changes) if i == index else it for i, it in enumerate(trace.values)]
    return replace(trace, values=tuple(found))


def with_storage(trace: Trace, index: int, **changes: Any) -> Trace:
    found = [replace(it, **changes) if i == index else it for i, it in enumerate(trace.storages)]
    return replace(trace, storages=tuple(found))


def with_saves(trace: Trace, index: int, **changes: Any) -> Trace:
    saves = tuple(replace(it, **changes) for it in trace.values[index].saves)
    return with_value(trace, index, saves=saves)


def test_signs_of_a_relu_and_places_of_a_pooling() -> None:
    trace = net()
    assert encoding_of(trace, RELU) == Encoding("sign", ELEMENTS // 8)
    assert encoding_of(trace, INDICES) == Encoding("uint16", 2 * ELEMENTS // 4)
    assert [encoding_of(trace, value) for value in (0, 3, 4)] == [None] * 3


@pytest.mark.parametrize(
    ("shape", "codec"),
    [
        ((1, 1, 16, 16), "uint8"),
        ((1, 1, 16, 17), "uint16"),
        ((1, 1, 256, 256), "uint16"),
        ((1, 1, 256, 257), "int32"),
        ((1, 1, 2**16, 2**15), "int32"),
        ((1, 1, 2**16, 2**16), None),
        ((7, 16, 16), "uint8"),
    ],
)
def test_the_plane_says_how_many_places_there_are(
    shape: tuple[int, ...], codec: str | None
) -> None:
    trace = net()
    of_relu, of_pool = trace.values[RELU].saves
    trace = with_value(trace, RELU, saves=(of_relu, replace(of_pool, shape=shape)))
    found = encoding_of(trace, INDICES)
    assert (found and found.codec) == codec


def test_in_three_dimensions_they_are_counted_through_all() -> None:
    trace = with_op(net(), 2, name="aten.max_pool3d_with_indices.default")
    found = encoding_of(trace, INDICES)
    assert found is not None
    assert found.codec == "uint16"
    trace = with_saves(trace, RELU, shape=(2, 40, 40, 50))
    assert encoding_of(trace, INDICES) == Encoding("int32", 4 * ELEMENTS // 4)


@pytest.mark.parametrize("value", [RELU, INDICES])
def test_the_program_must_be_followed(value: int) -> None:
    assert encoding_of(with_op(net(), 1, replayable=False), value) is None


@pytest.mark.parametrize("value", [RELU, INDICES])
def test_the_op_itself_must_have_saved_it_unless_code_is_fixed(value: int) -> None:
    trace = with_saves(net(), value, as_input=True)
    assert encoding_of(trace, value) is None
    assert encoding_of(replace(trace, source=Source.GRAPH), value) is not None


def test_nothing_else_may_read_it() -> None:
    trace = net()
    uses = trace.values[RELU].uses
    assert encoding_of(with_value(trace, RELU, uses=(*uses, Use(5))), RELU) is None
    # What reads it in forward reads what is there.
    assert encoding_of(with_value(trace, RELU, uses=(*uses, Use(2))), RELU) is not None


def test_each_time_it_is_taken_back_an_op_must_read_it() -> None:
    trace = net()
    uses = trace.values[RELU].uses
    assert encoding_of(with_value(trace, RELU, uses=uses[:-1]), RELU) is None
    unseen = replace(trace.values[RELU].saves[0], ordinal=9, reads=(5,), dropped=6)
    saves = (*trace.values[RELU].saves, unseen)
    assert encoding_of(with_value(trace, RELU, saves=saves), RELU) is None


@pytest.mark.parametrize("changes", [{"reads": ()}, {"op": 0}])
def test_who_else_saves_it_may_read_it_one_day(changes: dict[str, Any]) -> None:
    trace = net()
    other = replace(trace.values[RELU].saves[1], ordinal=9, **changes)
    saves = (*trace.values[RELU].saves, other)
    assert encoding_of(with_value(trace, RELU, saves=saves), RELU) is None


def test_it_is_no_gradient_of_somebody() -> None:
    assert encoding_of(with_storage(net(), RELU, death=6), RELU) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "aten.threshold.default"},
        {"name": "aten.clamp_min.default"},
    ],
)
def test_signs_are_enough_of_relus_alone(changes: dict[str, Any]) -> None:
    assert encoding_of(with_op(net(), 1, **changes), RELU) is None


@pytest.mark.parametrize("dtype", ["complex64", "int32", "float8_e4m3fn"])
def test_only_types_with_a_sign(dtype: str) -> None:
    assert encoding_of(with_saves(net(), RELU, dtype=dtype), RELU) is None


def test_saves_of_two_types_are_left_alone() -> None:
    trace = net()
    first, second = trace.values[RELU].saves
    assert (
        encoding_of(with_value(trace, RELU, saves=(first, replace(second, dtype="float16"))), RELU)
        is None
    )


def test_what_is_saved_again_after_it_was_let_go_is_left_alone() -> None:
    trace = net()
    first, second = trace.values[RELU].saves
    late = replace(first, packed=5, reads=(), dropped=6)
    assert encoding_of(with_value(trace, RELU, saves=(first, second, late)), RELU) is None


def test_another_saved_value_of_its_storage_would_not_come_back() -> None:
    trace = with_value(net(), 3, storage=1, version=1, saves=net().values[INDICES].saves)
    assert encoding_of(trace, RELU) is None


def test_what_backward_never_asks_for_has_no_moment_to_be_decoded() -> None:
    trace = with_saves(net(), INDICES, reads=())
    assert encoding_of(trace, INDICES) is None


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("aten.gt.Scalar", True),
        ("aten.native_dropout.default", True),
        ("aten.logical_not.default", True),
        ("aten.copy_.default", False),
        ("aten.gt_.Scalar", False),
    ],
)
def test_bools_are_bits_where_they_are_known_to_be_0_and_1(name: str, known: bool) -> None:
    trace = with_saves(net(), INDICES, dtype="bool", as_input=True)
    trace = with_op(trace, 2, name=name)
    found = encoding_of(trace, INDICES)
    assert found == (Encoding("bits", ELEMENTS // 4) if known else None)


def test_indices_of_something_else_are_left_alone() -> None:
    assert encoding_of(with_op(net(), 2, name="aten.argmax.default"), INDICES) is None


def test_where_the_input_is_not_saved_its_plane_is_not_known() -> None:
    trace = net()
    trace = with_value(trace, RELU, saves=trace.values[RELU].saves[:1])
    assert encoding_of(trace, INDICES) is None


def test_what_an_encoding_costs() -> None:
    assert passes(Encode("uint16", 20, 0, 1), 80) == Passes(100, 100, 0)
    # 1000 elements of two bytes each.
    assert passes(Encode("sign", 125, 0, 1), 2000) == Passes(
        2000 + 6000 + 125, 2000 + 9000 + 125, 1000
    )
    big = Encode("bits", PIECE, 0, 1)
    assert passes(big, 8 * PIECE).scratch == PIECE


@pytest.mark.parametrize(("device", "most"), [("cuda", ELEMENTS), ("cpu", 0)])
def test_what_it_takes_meanwhile_counts_on_a_gpu(device: str, most: int) -> None:
    trace = replace(net(), device=device)
    plan = Plan(
        *(trace.fingerprint, "by hand/1", Budget(1 << 40)),
        (Assignment(RELU, Encode("sign", ELEMENTS // 8, 2, 3)),),
    )
    assert scratch(trace, plan, Allocator(1, 0.0, 0)) == [0, 0, most, most, 0, 0]
