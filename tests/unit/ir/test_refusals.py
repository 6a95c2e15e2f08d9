"""A document that is off in one place is refused, and the message starts with that place."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from belady.errors import DocumentError, PlanMismatchError
from belady.ir import HardwareProfile, Measured, Plan, Run, Timeline, Trace, dumps, loads
from tests.unit.ir.documents import MACHINE, PLAN, TRACE, edited


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("version", 2, "version: this is 2, only 1 can be read here"),
        ("version", True, "version: this is true, only 1"),
        ("version", 1.0, "version: this is 1.0, only 1"),
        ("belady", "Plan", "belady: this is 'Plan', only 'Trace'"),
        ("color", 1, "document: unknown key 'color'"),
        ("ops", {}, "ops: expected a list, found an object"),
        ("ops.1", [], "ops[1]: expected an object, found a list of 0"),
        ("ops.1.reads.0", "1", "ops[1].reads[0]: expected an integer, found '1'"),
        ("ops.1.reads.0", True, "ops[1].reads[0]: expected an integer, found true"),
        ("ops.1.reads.0", 1.0, "ops[1].reads[0]: expected an integer, found 1.0"),
        ("ops.1.reads.0", 2**63, "ops[1].reads[0]: expected an integer between"),
        ("ops.1.reads.0", -(2**63) - 1, "ops[1].reads[0]: expected an integer between"),
        ("ops.1.reads.0", 10**6, "ops[1].reads[0]: 1000000 is not between 0 and"),
        ("ops.1.writes.0", -1, "ops[1].writes[0]: -1 is not between 0 and"),
        ("ops.0.device_seconds", None, "ops[0].device_seconds: expected a number, found null"),
        ("ops.0.device_seconds", False, "ops[0].device_seconds: expected a number, found false"),
        ("ops.0.device_seconds", float("nan"), "ops[0].device_seconds: expected a finite number"),
        ("ops.0.device_seconds", -1e-9, "ops[0].device_seconds: -1e-09 is negative"),
        ("ops.0.device_seconds", 10**400, "ops[0].device_seconds: expected an integer between"),
        ("ops.0.host_seconds", float("inf"), "ops[0].host_seconds: expected a finite number"),
        ("ops.0.workspace_bytes", -1, "ops[0].workspace_bytes: -1 is negative"),
        ("ops.0.name", 3, "ops[0].name: expected text, found 3"),
        ("ops.0.name", "x" * 4097, "ops[0].name: text of 4097 characters, more than 4096"),
        ("ops.0.name", "a\0b", "ops[0].name: text with a NUL"),
        ("ops.0.name", "\ud800", "ops[0].name: text with a NUL character or half of a surrogate"),
        ("ops.0.phase", "sideways", "ops[0].phase: expected one of 'forward', 'loss', "),
        ("ops.0.random", 0, "ops[0].random: expected true or false, found 0"),
        ("ops.0.batch_dims", [0, None, "x"], "ops[0].batch_dims[2]: expected an integer"),
        ("ops.4.forward_op", 6, "ops[4].forward_op: 6 is not between 0 and 5"),
        ("ops.1.algorithms.1.workspace_bytes", -1, "ops[1].algorithms[1].workspace_bytes: -1 is"),
        ("storages.0.home", "moon", "storages[0].home: expected one of 'device', 'host', 'disk'"),
        ("storages.0.nbytes", -1, "storages[0].nbytes: -1 is negative"),
        ("storages.0.birth", 7, "storages[0].birth: 7 is not between 0 and 6"),
        ("storages.3.released", 0, "storages[3].released: 0 lies before birth, which is"),
        ("storages.3.death", 0, "storages[3].death: 0 lies before released, which is"),
        ("values.0.storage", 99, "values[0].storage: 99 is not between 0 and"),
        ("values.0.producer", -2, "values[0].producer: -2 is not between -1 and 5"),
        ("values.0.uses.0.op", 6, "values[0].uses[0].op: 6 is not between 0 and 5"),
        ("values.0.saves.0.packed", 7, "values[0].saves[0].packed: 7 is not between 0 and 6"),
        ("values.0.saves.0.reads.0", 99, "values[0].saves[0].reads[0]: 99 is not between"),
        ("values.0.saves.0.dropped", -1, "values[0].saves[0].dropped: -1 is not between"),
        ("values.0.saves.0.shape", [-1], "values[0].saves[0].shape[0]: -1 is negative"),
        ("anchors", [0, 2, 2], "anchors[2]: 2 does not follow 2: not ascending"),
        ("anchors", [7], "anchors[0]: 7 is not between 0 and 6"),
        ("roots", "Net", "roots: expected a list, found 'Net'"),
        ("versions", [["torch"]], "versions[0]: expected a list of 2, found a list of 1"),
        ("versions", [["torch", 2]], "versions[0][1]: expected text, found 2"),
    ],
)
def test_refused_with_its_path(path: str, value: Any, message: str) -> None:
    with pytest.raises(DocumentError, match="^" + re.escape(message)):
        loads(Trace, edited(TRACE, path, value))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "assignments[0].decision: expected an object whose 'kind' is one of Keep, Offload"),
        ({}, "assignments[0].decision: expected an object whose 'kind' is one of"),
        ({"kind": "Trace"}, "assignments[0].decision: expected an object whose 'kind' is one of"),
        ({"kind": ["Keep"]}, "assignments[0].decision: expected an object whose 'kind' is one of"),
        ({"kind": "Keep", "at": 1}, "assignments[0].decision: unknown key 'at'"),
        ({"kind": "Recompute", "at": 1}, "assignments[0].decision: the key 'ops' is missing"),
        ({"kind": "Recompute", "at": 1, "ops": [0.5]}, "assignments[0].decision.ops[0]: expected"),
    ],
)
def test_decision_is_refused(value: Any, message: str) -> None:
    assignment = {"value": 0, "decision": value, "reason": ""}
    with pytest.raises(DocumentError, match="^" + re.escape(message)):
        loads(Plan, edited(PLAN, "assignments", [assignment]))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("capacities.0.nbytes", -1, "capacities[0].nbytes: -1 is negative"),
        ("outside_bytes", -1, "outside_bytes: -1 is negative"),
        ("hook_s", -1, "hook_s: -1.0 is negative"),
        ("allocator.round_bytes", 0, "allocator.round_bytes: 0 is not at least 1"),
        ("allocator.margin_fraction", -0.1, "allocator.margin_fraction: -0.1 is negative"),
        ("links.0.curve", [], "links[0].curve: empty"),
        ("links.0.curve", [[1, 0]], "links[0].curve[0]: a rate of 0.0"),
        ("links.0.curve", [[0, 1]], "links[0].curve[0]: 0 bytes do not follow 0"),
        ("links.0.curve", [[2, 1], [2, 1]], "links[0].curve[1]: 2 bytes do not follow 2"),
        (
            "links.0.curve",
            [[2, 1, 3]],
            "links[0].curve[0]: expected a list of 2, found a list of 3",
        ),
        ("links.0.duplex_bytes_per_s", 0, "links[0].duplex_bytes_per_s: 0.0 is not a rate"),
        ("links.0.latency_s", -1, "links[0].latency_s: -1.0 is negative"),
    ],
)
def test_hardware_is_refused(path: str, value: Any, message: str) -> None:
    text = edited(MACHINE, path, value)
    with pytest.raises(DocumentError, match="^" + re.escape(message)):
        loads(HardwareProfile, text)


SPAN = {"lane": "compute", "start_s": 0.0, "end_s": 1.0, "op": 0, "value": -1}
STALL = {"cause": "host", "op": 0, "value": -1, "seconds": 1.0, "start_s": 0.0}
HELD = {"boundary": 0, "seconds": 0.0, "nbytes": 1}
OFFLOAD = {
    "kind": "Offload",
    "tier": "host",
    "copy_out_after": 0,
    "free_at": 1,
    "copy_in_at": 2,
    "ready_by": 3,
}
RECOMPUTE = {"kind": "Recompute", "ops": [0], "at": 3}
ENCODE = {"kind": "Encode", "codec": "bits", "nbytes": 1, "encode_at": 0, "decode_at": 3}
MANAGED = {
    "kind": "Managed",
    "prefetch_out_at": 0,
    "gone_by": 1,
    "prefetch_in_at": 2,
    "ready_by": 3,
    "faults": False,
}
# The trace has 6 ops.
ENDS = len(TRACE.ops)
FAR = len(TRACE.values)
STORAGES = len(TRACE.storages)
HOLDING = Run(
    TRACE,
    MACHINE,
    replace(PLAN, trace=TRACE.fingerprint),
    Timeline(0.0, 0.0, (), 0),
    Measured(2, 1.0, (1.0,), ()),
)


def decided(decision: dict[str, Any], value: int = 0, **changes: Any) -> list[dict[str, Any]]:
    return [{"value": value, "decision": decision | changes, "reason": ""}]


def test_a_run_may_name_all_that_its_trace_has() -> None:
    last = {"op": ENDS, "value": FAR - 1}
    for path, value in (
        ("plan.assignments", decided(OFFLOAD, FAR - 1, copy_out_after=-1, ready_by=ENDS)),
        ("plan.assignments", decided(RECOMPUTE, ops=[ENDS - 1], at=ENDS)),
        ("plan.assignments", decided(ENCODE, decode_at=ENDS)),
        ("plan.assignments", decided(MANAGED, ready_by=ENDS)),
        ("plan.order_edits", [{"op": ENDS - 1, "before": ENDS}]),
        ("plan.reuse_classes", [[0, STORAGES - 1]]),
        ("predicted.curve", [1] * ENDS),
        ("predicted.peak_op", ENDS - 1),
        ("predicted.spans", [SPAN | last, SPAN | {"op": -1, "start_s": -1.0}]),
        ("measured.stalls", [STALL | last, STALL | {"op": -1, "start_s": -1.0}]),
        ("measured.held", [HELD | {"boundary": ENDS}]),
    ):
        text = edited(HOLDING, path, value)
        assert json.loads(dumps(loads(Run, text))) == json.loads(text)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("trace.anchors", [99], "trace.anchors[0]: 99 is not between 0 and 6"),
        ("hardware.outside_bytes", -1, "hardware.outside_bytes: -1 is negative"),
        ("plan.assignments", decided(OFFLOAD, FAR), f"plan.assignments[0].value: {FAR} is not"),
        ("plan.assignments", decided({"kind": "Keep"}, -1), "plan.assignments[0].value: -1 is not"),
        (
            "plan.assignments",
            decided(OFFLOAD, copy_out_after=-2),
            "plan.assignments[0].decision.copy_out_after: -2 is not between -1 and 6",
        ),
        (
            "plan.assignments",
            decided(OFFLOAD, ready_by=7),
            "plan.assignments[0].decision.ready_by: 7 is not between 0 and 6",
        ),
        (
            "plan.assignments",
            decided(RECOMPUTE, ops=[0, ENDS]),
            "plan.assignments[0].decision.ops[1]: 6 is not between 0 and 5",
        ),
        ("plan.assignments", decided(RECOMPUTE, at=7), "plan.assignments[0].decision.at: 7"),
        ("plan.assignments", decided(ENCODE, encode_at=-1), "plan.assignments[0].decision.encode_"),
        (
            "plan.assignments",
            decided(MANAGED, prefetch_in_at=7),
            "plan.assignments[0].decision.prefetch_in_at: 7 is not",
        ),
        (
            "plan.assignments",
            decided(MANAGED, gone_by=7),
            "plan.assignments[0].decision.gone_by: 7 is not",
        ),
        (
            "hardware.managed.fault.latency_s",
            -1.0,
            "hardware.managed.fault.latency_s: -1.0 is negative",
        ),
        ("plan.order_edits", [{"op": ENDS, "before": 0}], "plan.order_edits[0].op: 6 is not"),
        ("plan.order_edits", [{"op": 0, "before": 7}], "plan.order_edits[0].before: 7 is not"),
        ("plan.reuse_classes", [[STORAGES]], f"plan.reuse_classes[0][0]: {STORAGES} is not"),
        ("plan.layer_algorithms", [[ENDS, "x"]], "plan.layer_algorithms[0][0]: 6 is not"),
        ("predicted.curve", [1], "predicted.curve: 1 numbers for 6 ops"),
        ("predicted.peak_op", ENDS, "predicted.peak_op: 6 is not between 0 and 5"),
        ("predicted.spans", [SPAN | {"op": 7}], "predicted.spans[0].op: 7 is not between -1 and 6"),
        ("predicted.spans", [SPAN, SPAN | {"value": FAR}], "predicted.spans[1].value: "),
        (
            "predicted.spans",
            [SPAN | {"start_s": 2.0}],
            "predicted.spans[0]: from 2.0 to 1.0 seconds, which cannot be drawn",
        ),
        ("predicted.spans", [SPAN | {"end_s": 1e300}], "predicted.spans[0]: from 0.0 to 1e+300"),
        ("measured.spans", [SPAN | {"op": -2}], "measured.spans[0].op: -2 is not"),
        ("measured.stalls", [STALL | {"op": -2}], "measured.stalls[0].op: -2 is not"),
        ("measured.stalls", [STALL | {"value": FAR}], "measured.stalls[0].value: "),
        (
            "measured.stalls",
            [STALL | {"seconds": -1.0}],
            "measured.stalls[0].seconds: -1.0 is not between 0 and 1e+09",
        ),
        ("measured.stalls", [STALL | {"seconds": 1e300}], "measured.stalls[0].seconds: 1e+300 is"),
        ("measured.stalls", [STALL | {"start_s": 1e300}], "measured.stalls[0].start_s: 1e+300 is"),
        ("measured.held", [HELD | {"boundary": 7}], "measured.held[0].boundary: 7 is not"),
        ("measured.held", [HELD | {"seconds": 1e300}], "measured.held[0].seconds: 1e+300 is not"),
    ],
)
def test_a_run_whose_parts_do_not_belong_together_is_refused(
    path: str, value: Any, message: str
) -> None:
    with pytest.raises(DocumentError, match="^" + re.escape(message)):
        loads(Run, edited(HOLDING, path, value))


def test_a_run_with_a_plan_for_another_trace_is_refused() -> None:
    with pytest.raises(PlanMismatchError, match=f"is for trace 0+, .* {TRACE.fingerprint}$"):
        loads(Run, edited(HOLDING, "plan.trace", "0" * 16))
    with pytest.raises(PlanMismatchError, match="is for trace 0000000000000000"):
        dumps(replace(HOLDING, plan=PLAN))
