"""Bytes that an iteration holds on average, and what allocating for the whole network would take.

vDNN (MICRO-49, 2016, arXiv 1602.08124) says how much less memory it holds on average than a
network-wide allocation takes, in which every buffer of every layer is there all the time. Imports
no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from belady.ir.hardware import Allocator
from belady.ir.run import Run
from belady.ir.timeline import Held
from belady.ir.trace import Phase, Storage, Trace
from benchmarks.cases import Record


class NetworkWide(NamedTuple):
    """Bytes of a network-wide allocation, each as the allocator rounds it.

    Attributes
    ----------
    persistent
        Parameters, buffers, gradients of parameters and optimizer state.
    feature_maps
        All else that is there before the iteration (its input), and all that forward and loss
        make, as if nothing were let go: outputs once where layers work in place, indices of
        poolings, masks of dropouts, and what an op makes for the next one alone.
    gradient_maps
        The most of what backward makes beside gradients of parameters that is alive at once: with
        fewer bytes no reuse of buffers can do. In a chain these are a layer's dY and dX.
    workspace
        The largest that an op takes; all ops share it.
    """

    persistent: int
    feature_maps: int
    gradient_maps: int
    workspace: int


def network_wide(trace: Trace, allocator: Allocator) -> NetworkWide:
    """What a network-wide allocation takes for the iteration of ``trace``."""
    made: dict[Phase, list[Storage]] = {phase: [] for phase in Phase}
    for storage in trace.storages:
        if not storage.persistent and storage.birth < len(trace.ops):
            made[trace.ops[storage.birth].phase].append(storage)
    layers = made[Phase.FORWARD] + made[Phase.LOSS]
    return NetworkWide(
        sum(allocator.held(s.nbytes) for s in trace.storages if s.persistent),
        sum(allocator.held(storage.nbytes) for storage in layers),
        max(_alive(made[Phase.BACKWARD], len(trace.ops), allocator), default=0),
        max((allocator.held(op.workspace_bytes) for op in trace.ops), default=0),
    )


def average(held: Sequence[int], trace: Trace) -> int:
    """Bytes held during each op, averaged over kernel time of forward, loss and backward.

    0 where no kernel took any time. Waits have no curve of their own. The optimizer is left out: it
    holds nothing but what lasts, so that the average would be lower for it.
    """
    seconds = [0 if op.phase is Phase.OPTIMIZER else op.device_seconds for op in trace.ops]
    weighted = sum(nbytes * time for nbytes, time in zip(held, seconds, strict=True))
    return int(weighted / sum(seconds)) if any(seconds) else 0


def held_on_average(run: Run) -> Record:
    """What a record says of an iteration's average memory.

    ``average_bytes`` is of the plan's bytes op by op, as predicted, over measured kernel seconds.
    ``sampled_average_bytes`` is of what torch's allocator had given out at each anchor of the
    recorded iteration, by the device's clock: waits count, what ops take and give back between two
    anchors does not. A CPU has no such allocator.
    """
    trace, allocator = run.trace, run.hardware.allocator
    lasting = [storage for storage in trace.storages if storage.persistent]
    record: Record = {
        "network_wide": network_wide(trace, allocator)._asdict(),
        "average_bytes": average(run.predicted.curve, trace),
        "average_persistent_bytes": average(_alive(lasting, len(trace.ops), allocator), trace),
    }
    sampled = _sampled(run.measured.held) if run.measured else None
    return record if sampled is None else record | {"sampled_average_bytes": sampled}


def _alive(storages: Sequence[Storage], length: int, allocator: Allocator) -> list[int]:
    """Bytes of those storages that are held during each op, if nothing moves."""
    change = [0] * (length + 1)
    for storage in storages:
        change[storage.birth] += allocator.held(storage.nbytes)
        change[storage.death] -= allocator.held(storage.nbytes)
    return list(accumulate(change[:length]))


def _sampled(held: Sequence[Held]) -> int | None:
    """Average of samples, each of which holds until the next; None where there is no time."""
    samples = sorted(held, key=lambda sample: sample.seconds)
    spans = [(one.nbytes, two.seconds - one.seconds) for one, two in pairwise(samples)]
    total = sum(seconds for _, seconds in spans)
    return int(sum(nbytes * seconds for nbytes, seconds in spans) / total) if total else None
