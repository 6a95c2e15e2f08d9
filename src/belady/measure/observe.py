"""Turns what a `Recorder` saw into a Trace of the steady iteration."""

from __future__ import annotations

import functools
from dataclasses import replace
from statistics import median
from time import perf_counter

import torch

from belady.ir.trace import (
    Op,
    Phase,
    Save,
    Source,
    Storage,
    StorageKind,
    Tier,
    Trace,
    Value,
)
from belady.measure.algorithms import fastest_first, knowing
from belady.measure.clock import NoClock
from belady.measure.recorder import Recorder
from belady.measure.records import RawOp, RawSave, RawStorage
from belady.measure.trials import Trials
from belady.planners.workspace import USUAL

_TRIALS = 500
# Times the median op beyond which an op did not only issue work.
_OUTLIER = 5.0


def assemble(
    recorder: Recorder, roots: tuple[str, ...], source: Source, unseen_bytes: int = 0
) -> Trace:
    """Build the Trace of the iteration that ``recorder`` watched.

    Parameters
    ----------
    recorder
        After the iteration; persistent storages must have been adopted.
    roots
        Class name of the root of each pass.
    source
        STATIC or EAGER.
    unseen_bytes
        Device bytes that were held throughout without ever being an operand.

    Notes
    -----
    What the first iteration creates for good (optimizer state) is there from the start of a
    steady one.
    """
    end = len(recorder.ops)
    first = _first_op_by_sequence(recorder)
    saves: dict[int, list[Save]] = {}
    staying = _told_apart(recorder)
    for raw in recorder.saves:
        if raw.value >= 0:
            save = _save(recorder, raw, first)
            saves.setdefault(raw.value, []).append(save)
            if _written_after_save(recorder, raw.value, save):
                staying.add(recorder.values[raw.value].storage)
    dropped = _dropped_by_storage(recorder, saves)
    storages = [
        _storage(raw, end, dropped.get(index), index in staying)
        for index, raw in enumerate(recorder.storages)
    ]
    if unseen_bytes > 0:
        device = str(recorder.device)
        storages.append(Storage(device, unseen_bytes, StorageKind.OTHER, 0, end, end))
    values = tuple(
        Value(raw.storage, raw.version, raw.producer, tuple(raw.uses), tuple(saves.get(index, ())))
        for index, raw in enumerate(recorder.values)
    )
    # The engine knows a handle by its first read alone.
    anchors = {b for of in saves.values() for save in of for b in (save.packed, *save.reads[:1])}
    return Trace(
        source,
        recorder.device.type,
        roots,
        tuple(_ops(recorder, first, timed=source is not Source.STATIC)),
        tuple(storages),
        values,
        tuple(sorted(anchors)),
        (("torch", str(torch.__version__)),),
    )


def undisturbed(trace: Trace, other: Trace | None) -> Trace:
    """The trace with the smaller seconds of two observations, for as long as their ops agree.

    What happens once (a library looks for its fastest algorithm, the allocator flushes its cache
    in the middle of an op) makes an op look slow in one of them. What runs instead of an op when it
    is replayed was seen in one alone, as it asked for bytes beside what the op had left: it takes
    no longer than the op.
    """
    if other is None:
        return trace
    ops = list(trace.ops)
    for index, (one, two) in enumerate(zip(trace.ops, other.ops, strict=False)):
        if one.name != two.name or one.reads != two.reads:
            break
        seconds = min(one.device_seconds, two.device_seconds)
        ops[index] = replace(
            one,
            device_seconds=seconds,
            host_seconds=min(one.host_seconds, two.host_seconds),
            shortcut=one.shortcut
            and replace(one.shortcut, device_seconds=min(one.shortcut.device_seconds, seconds)),
            algorithms=fastest_first(
                replace(it, device_seconds=seconds) if it.name == USUAL else it
                for it in one.algorithms
            ),
        )
    return replace(trace, ops=tuple(ops))


def held_bytes(recorder: Recorder, round_bytes: int) -> list[int]:
    """Bytes that were really held during each op, each storage rounded to ``round_bytes``."""
    end = len(recorder.ops)
    change = [0] * (end + 1)
    for storage in recorder.storages:
        held = -(-storage.nbytes // round_bytes) * round_bytes
        for birth, death in storage.lives:
            change[birth] += held
            change[end if death < 0 else death] -= held
    for index in range(end):
        change[index + 1] += change[index]
    return change[:end]


def _first_op_by_sequence(recorder: Recorder) -> dict[int, int]:
    """Forward op of each autograd node: the first op issued once the node exists."""
    first: dict[int, int] = {}
    for index, op in enumerate(recorder.ops):
        if op.phase in (Phase.FORWARD, Phase.LOSS):
            first.setdefault(op.sequence, index)
    return first


def _ops(recorder: Recorder, first: dict[int, int], *, timed: bool) -> list[Op]:
    ops = []
    timings = recorder.clock.results()
    issue = _issue_seconds(recorder) if timed else [0.0] * len(recorder.ops)
    for raw, run, host_seconds in zip(recorder.ops, timings, issue, strict=True):
        forward = first.get(raw.sequence) if raw.phase is Phase.BACKWARD else None
        origin = raw if forward is None else recorder.ops[forward]
        ops.append(_op(raw, origin, (forward, host_seconds), run))
    if recorder.trials is not None:
        ops = _with_replays(ops, recorder.trials)
    leaner = {} if recorder.algorithms is None else recorder.algorithms.found()
    for index, lean in leaner.items():
        ops[index] = knowing(ops[index], lean)
    return ops


def _with_replays(ops: list[Op], trials: Trials) -> list[Op]:
    shortcuts = trials.shortcuts()
    return [
        replace(op, replayable=index in trials.recipes, shortcut=shortcuts.get(index))
        for index, op in enumerate(ops)
    ]


def _issue_seconds(recorder: Recorder) -> list[float]:
    """Host time of each op, less what watching adds and less waiting for the device.

    A call that waits (the allocator flushes its cache, a launch queue is full) stands out: nothing
    that only issues work takes many times what the other ops take.
    """
    bias = dispatch_seconds()
    seconds = [max(raw.host_seconds - bias, 0.0) for raw in recorder.ops]
    if recorder.device.type == "cpu":
        return seconds
    longest = _OUTLIER * median(seconds) if seconds else 0.0
    return [min(second, longest) for second in seconds]


def _op(raw: RawOp, origin: RawOp, issue: tuple[int | None, float], run: tuple[float, int]) -> Op:
    forward, host_seconds = issue
    seconds, workspace = run
    return Op(
        raw.name,
        origin.module,
        raw.phase,
        origin.pass_index,
        raw.mode,
        seconds,
        host_seconds,
        workspace,
        raw.reads,
        raw.writes,
        raw.random,
        raw.mutates,
        raw.communicates,
        (),
        forward,
    )


@functools.cache
def dispatch_seconds() -> float:
    """Host time that watching adds to an op although the recorder does not count it, in seconds.

    The way from C++ into the mode and back. Measured on an op that does nearly nothing: what the
    recorder makes of it, less what it takes unwatched.
    """
    tensor = torch.zeros(1)
    recorder = Recorder(torch.device("cpu"), NoClock())
    plain = []
    for _ in range(_TRIALS):
        begun = perf_counter()
        tensor.add_(1)
        plain.append(perf_counter() - begun)
    with recorder:
        for _ in range(_TRIALS):
            tensor.add_(1)
    watched = median(op.host_seconds for op in recorder.ops)
    return max(0.0, watched - median(plain))


def _save(recorder: Recorder, raw: RawSave, first: dict[int, int]) -> Save:
    end = len(recorder.ops)
    op = min(first.get(raw.sequence, raw.packed), end - 1)
    return Save(
        raw.pass_index,
        raw.ordinal,
        op,
        raw.packed,
        tuple(raw.reads),
        end if raw.dropped is None else raw.dropped,
        recorder.values[raw.value].producer < op,
        raw.module,
        raw.shape,
        raw.stride,
        raw.offset,
        raw.dtype,
    )


def _written_after_save(recorder: Recorder, value: int, save: Save) -> bool:
    """Whether the saving op writes what it has saved (rrelu's noise): a copy would be too early."""
    storage = recorder.values[value].storage
    written = recorder.ops[save.op].writes
    return save.packed <= save.op and any(
        recorder.values[other].storage == storage and other != value for other in written
    )


def _told_apart(recorder: Recorder) -> set[int]:
    """Storages that tensors with version counters of their own share (`.data`, cuDNN's weights).

    Autograd saves one value under several versions; the engine, which knows a content by storage
    and version, would take it for several, so it stays.
    """
    versions: dict[int, int] = {}
    found = set()
    for raw in recorder.saves:
        if raw.value >= 0 and versions.setdefault(raw.value, raw.version) != raw.version:
            found.add(recorder.values[raw.value].storage)
    return found


def _dropped_by_storage(recorder: Recorder, saves: dict[int, list[Save]]) -> dict[int, int]:
    dropped: dict[int, int] = {}
    for value, of in saves.items():
        storage = recorder.values[value].storage
        dropped[storage] = max(dropped.get(storage, 0), *(save.dropped for save in of))
    return dropped


def _storage(raw: RawStorage, end: int, dropped: int | None, stays: bool) -> Storage:
    deaths = [end if death < 0 else death for _, death in raw.lives]
    birth, released, death = raw.lives[0][0], deaths[0], max(deaths)
    kind = raw.kind or StorageKind.ACTIVATION
    if kind in (StorageKind.PARAMETER, StorageKind.BUFFER, StorageKind.STATE):
        return Storage(raw.device, raw.nbytes, kind, 0, end, end, Tier.DEVICE)
    if kind is StorageKind.GRADIENT:
        return Storage(raw.device, raw.nbytes, kind, birth, death, death, Tier.DEVICE)
    death = max(death, dropped or 0)
    # Never released before death: moving such a storage gains nothing, so no planner will.
    released = death if stays else min(released, death)
    return Storage(raw.device, raw.nbytes, kind, birth, released, death)
