"""Do the numbers in a document refer to what is there, and could they be measured?"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import NoReturn

from belady.errors import DocumentError
from belady.ir.hardware import HardwareProfile, Link
from belady.ir.run import Run
from belady.ir.trace import Op, Save, Storage, Trace, Value


def validate(document: object) -> None:
    """Check a Trace, a HardwareProfile or both in a Run; other documents refer to nothing.

    Raises
    ------
    DocumentError
        If an id or boundary is out of range or out of order, or a size, duration or rate is
        negative or not finite; the message starts with the path inside the document.
    """
    if isinstance(document, Trace):
        _trace(document, "")
    elif isinstance(document, HardwareProfile):
        _hardware(document, "")
    elif isinstance(document, Run):
        _trace(document.trace, "trace.")
        _hardware(document.hardware, "hardware.")


def _fail(path: str, message: str) -> NoReturn:
    raise DocumentError(f"{path}: {message}")


def _within(path: str, number: int, low: int, high: int) -> None:
    if not low <= number <= high:
        _fail(path, f"{number} is not between {low} and {high}")


def _all_within(path: str, numbers: Iterable[int], low: int, high: int) -> None:
    for index, number in enumerate(numbers):
        if not low <= number <= high:
            _fail(f"{path}[{index}]", f"{number} is not between {low} and {high}")


def _amount(path: str, number: float) -> None:
    # Also false for NaN.
    if not 0 <= number < math.inf:
        _fail(path, f"{number} is negative or not finite")


def _ascending(path: str, numbers: list[tuple[str, int]]) -> None:
    for (low_name, low), (name, number) in pairwise(numbers):
        if low > number:
            _fail(f"{path}.{name}", f"{number} lies before {low_name}, which is {low}")


def _trace(trace: Trace, prefix: str) -> None:
    end = len(trace.ops)
    for index, op in enumerate(trace.ops):
        _op(f"{prefix}ops[{index}]", op, len(trace.values), end)
    for index, storage in enumerate(trace.storages):
        _storage(f"{prefix}storages[{index}]", storage, end)
    for index, value in enumerate(trace.values):
        path = f"{prefix}values[{index}]"
        _within(f"{path}.storage", value.storage, 0, len(trace.storages) - 1)
        _value(path, value, end)
    _all_within(f"{prefix}anchors", trace.anchors, 0, end)
    for index, (before, after) in enumerate(pairwise(trace.anchors), start=1):
        if before >= after:
            _fail(f"{prefix}anchors[{index}]", f"{after} does not follow {before}: not ascending")


def _op(path: str, op: Op, values: int, end: int) -> None:
    _all_within(f"{path}.reads", op.reads, 0, values - 1)
    _all_within(f"{path}.writes", op.writes, 0, values - 1)
    _amount(f"{path}.device_seconds", op.device_seconds)
    _amount(f"{path}.host_seconds", op.host_seconds)
    _amount(f"{path}.workspace_bytes", op.workspace_bytes)
    _amount(f"{path}.pass_index", op.pass_index)
    if op.forward_op is not None:
        _within(f"{path}.forward_op", op.forward_op, 0, end - 1)
    for index, algorithm in enumerate(op.algorithms):
        inner = f"{path}.algorithms[{index}]"
        _amount(f"{inner}.device_seconds", algorithm.device_seconds)
        _amount(f"{inner}.workspace_bytes", algorithm.workspace_bytes)


def _storage(path: str, storage: Storage, end: int) -> None:
    _amount(f"{path}.nbytes", storage.nbytes)
    _within(f"{path}.birth", storage.birth, 0, end)
    _within(f"{path}.death", storage.death, 0, end)
    _ascending(
        path,
        [("birth", storage.birth), ("released", storage.released), ("death", storage.death)],
    )


def _value(path: str, value: Value, end: int) -> None:
    _amount(f"{path}.version", value.version)
    _within(f"{path}.producer", value.producer, -1, end - 1)
    for index, use in enumerate(value.uses):
        _within(f"{path}.uses[{index}].op", use.op, 0, end - 1)
    for index, save in enumerate(value.saves):
        _save(f"{path}.saves[{index}]", save, end)


def _save(path: str, save: Save, end: int) -> None:
    _within(f"{path}.op", save.op, 0, end - 1)
    _amount(f"{path}.pass_index", save.pass_index)
    _amount(f"{path}.ordinal", save.ordinal)
    _within(f"{path}.packed", save.packed, 0, end)
    _within(f"{path}.dropped", save.dropped, save.packed, end)
    _all_within(f"{path}.reads", save.reads, save.packed, save.dropped)
    for name, numbers in (("shape", save.shape), ("stride", save.stride)):
        for index, number in enumerate(numbers):
            _amount(f"{path}.{name}[{index}]", number)
    _amount(f"{path}.offset", save.offset)


def _hardware(hardware: HardwareProfile, prefix: str) -> None:
    for index, capacity in enumerate(hardware.capacities):
        _amount(f"{prefix}capacities[{index}].nbytes", capacity.nbytes)
    for index, link in enumerate(hardware.links):
        _link(f"{prefix}links[{index}]", link)
    _amount(f"{prefix}outside_bytes", hardware.outside_bytes)
    allocator = hardware.allocator
    if allocator.round_bytes < 1:
        _fail(f"{prefix}allocator.round_bytes", f"{allocator.round_bytes} is not at least 1")
    _amount(f"{prefix}allocator.margin_fraction", allocator.margin_fraction)
    _amount(f"{prefix}allocator.margin_bytes", allocator.margin_bytes)


def _link(path: str, link: Link) -> None:
    if not link.curve:
        _fail(f"{path}.curve", "empty: at least one measured size is needed")
    for index, (_, rate) in enumerate(link.curve):
        if not 0 < rate < math.inf:
            _fail(f"{path}.curve[{index}]", f"a rate of {rate} bytes per second")
    sizes = [0, *(nbytes for nbytes, _ in link.curve)]
    for index, (before, after) in enumerate(pairwise(sizes)):
        if before >= after:
            _fail(f"{path}.curve[{index}]", f"{after} bytes do not follow {before}: not ascending")
    if not 0 < link.duplex_bytes_per_s < math.inf:
        _fail(f"{path}.duplex_bytes_per_s", f"{link.duplex_bytes_per_s} is not a rate")
    _amount(f"{path}.latency_s", link.latency_s)
