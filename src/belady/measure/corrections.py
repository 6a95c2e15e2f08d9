"""What iterations under a plan say of the trace and the machine that it was made for."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from belady.ir.curves import curve
from belady.ir.hardware import Allocator, HardwareProfile, Link
from belady.ir.margin import moving_peak
from belady.ir.plan import Encode, Offload, Plan, Recompute
from belady.ir.scratch import scratch
from belady.ir.timeline import Measured, Timeline
from belady.ir.trace import Op, Phase, Tier, Trace
from belady.measure.monitor import Sample
from belady.simulate import simulate
from belady.simulate.engine import kernel_seconds

_HOST_AGREES = 0.95
_ISSUE_AGREES = 0.8
# An iteration shorter than that share of the predicted one, or one that waits longer for copies, by
# that share of it. By how much of what it is shorter it waits less, at least. What its links are
# then tried as.
_LINKS_AGREE, _STALLS_AGREE = 0.8, 0.01
_WAITS = 0.5
_FASTER = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
_SLOWER = tuple(0.98**step for step in range(1, 20))
# Of all kernels: what is too little to correct, and what no clock explains.
_KERNELS_AGREE, _KERNELS_AT_MOST = 0.01, 0.3
# A plan is made again for a smaller margin only where the smaller one lets in clearly more. A
# library that does not get its workspace takes a slower algorithm and stays with it: halves end.
_MARGIN_STEP, _HALVED_AT_LEAST = 0.03, 0.08
MARGIN_AT_LEAST = 0.05
_EXACT = Allocator(1, 0.0, 0)
_LOSES = 1.01


def with_host_of(trace: Trace, samples: Sequence[Sample]) -> Trace | None:
    """The trace with host seconds as unobserved iterations show them; None if they agree.

    Watching slows the host down, so the seconds of an observed iteration are upper bounds. What
    the host spent in the roots of an iteration that nobody watched is another: in a busy launch
    queue it contains waiting for the device. The smaller one holds.
    """
    if trace.device == "cpu":
        # The host runs the ops itself: its own share was measured apart.
        return None
    spent = min(sample.host_seconds for sample in samples)
    watched = sum(op.host_seconds for op in trace.ops if op.phase is Phase.FORWARD)
    if not 0 < spent < _HOST_AGREES * watched:
        return None
    share = spent / watched
    ops = tuple(replace(op, host_seconds=op.host_seconds * share) for op in trace.ops)
    return replace(trace, ops=ops)


def with_issue_of(
    hardware: HardwareProfile, plan: Plan, samples: Sequence[Sample], probed: HardwareProfile
) -> HardwareProfile | None:
    """The machine with what issuing took, of a copy or of a value that is made again, and hooks.

    None if it agrees. The probe issues many small copies and nothing else. In an iteration the host
    takes a value over first, its caches are full of other things, and copies under way take its
    memory's bandwidth. What disturbs the host makes it slower only: where the next plan shows less,
    that holds.

    Parameters
    ----------
    probed
        As the probe found it, before any correction.
    """
    if hardware.device == "cpu":
        return None
    kinds = Counter(type(decision) for decision in plan.decisions.values())
    replays, copies = kinds[Recompute] + kinds[Encode], kinds[Offload]
    replay_s = min(sample.replay_seconds for sample in samples)
    copy_s = min(sample.engine_seconds - sample.replay_seconds for sample in samples)

    def corrected(link: Link, before: Link) -> Link:
        stays = link.source is link.target is Tier.DEVICE
        # A copy goes each way.
        count, seconds = (replays, replay_s) if stays else (2 * copies, copy_s)
        if not link.issue_s or not count:
            return link
        least = link.issue_s if link.issue_s > before.issue_s else inf
        issue = max(before.issue_s, min(least, seconds / count))
        agrees = min(issue, link.issue_s) >= _ISSUE_AGREES * max(issue, link.issue_s)
        return link if agrees else replace(link, issue_s=issue)

    links = tuple(map(corrected, hardware.links, probed.links))
    found = replace(hardware, links=links, hook_s=_hook_s(hardware, replays + copies, samples))
    return None if found == hardware else found


def _hook_s(hardware: HardwareProfile, values: int, samples: Sequence[Sample]) -> float:
    """What hooks take for each of so many values: as known, unless it is less, or first seen."""
    known, seconds = hardware.hook_s, min(sample.hook_seconds for sample in samples)
    if not seconds or not values:
        return known
    found = seconds / values
    return known if found >= _ISSUE_AGREES * known > 0 else found


def with_links_of(
    trace: Trace, plan: Plan, hardware: HardwareProfile, samples: Sequence[Sample]
) -> HardwareProfile | None:
    """The machine with links as fast as an iteration that waits for them shows; None if they agree.

    What else moved while the links were measured made them slow, and that is remembered. And in an
    iteration copies can be slower than while nothing else runs: at 50 instead of 55 GB/s in that of
    VGG-19 in fp32, on an H200. Or slower beside its kernels than was thought: those that a compiler
    has fused are known all together, and some are faster than the trace has them. While the
    allocator flushes its cache all waits for the host: that is no rate of a link.
    """
    shown = [it for it in samples if not it.retries]
    if hardware.device == "cpu" or not shown:
        return None
    predicted = simulate(trace, hardware, plan)
    sample = min(shown, key=lambda it: it.seconds)
    excess = predicted.seconds - sample.seconds
    waited = sample.stall_seconds - predicted.stall_seconds
    # Links are why an iteration is short only where it also waits less for them, by about as much:
    # of kernels that nobody has watched those between boundaries may look slow for other reasons.
    shorter = 0 < sample.seconds < _LINKS_AGREE * predicted.seconds
    if shorter and predicted.stall_seconds >= excess and -waited >= _WAITS * excess:
        found = _first(_FASTER, lambda times: _explain(sample, trace, plan, hardware, times))
        return _all_times(hardware, found or _FASTER[-1])
    if min(waited, -excess) > _STALLS_AGREE * predicted.seconds:
        found = _first(
            _SLOWER,
            lambda times: (
                _with_links(trace, plan, hardware, times).stall_seconds >= sample.stall_seconds
            ),
        )
        # Where no wait was foretold, and no such links explain those measured, they are not why.
        if found is None and predicted.stall_seconds == 0:
            return None
        return _all_times(hardware, found or _SLOWER[-1])
    return None


def _explain(
    sample: Sample, trace: Trace, plan: Plan, hardware: HardwareProfile, times: float
) -> bool:
    """Whether links that many times as fast are enough for how long it took, or it waited."""
    found = _with_links(trace, plan, hardware, times)
    return found.seconds <= sample.seconds or found.stall_seconds <= sample.stall_seconds


def _first(factors: Sequence[float], agrees: Callable[[float], bool]) -> float | None:
    """The first factor that ``agrees``, as all after it do; None if none does.

    By halves: a long trace takes a second to simulate.
    """
    place = bisect_left(factors, True, key=agrees)
    return factors[place] if place < len(factors) else None


def _with_links(trace: Trace, plan: Plan, hardware: HardwareProfile, times: float) -> Timeline:
    """What the plan is predicted to do with links that many times as fast."""
    return simulate(trace, _all_times(hardware, times), plan)


def _all_times(hardware: HardwareProfile, times: float) -> HardwareProfile:
    return replace(hardware, links=tuple(_times(link, times) for link in hardware.links))


def _times(link: Link, times: float) -> Link:
    if link.source is link.target:
        return link
    curve = tuple((nbytes, times * rate) for nbytes, rate in link.curve)
    return replace(link, curve=curve, duplex_bytes_per_s=times * link.duplex_bytes_per_s)


def with_device_of(
    trace: Trace, plan: Plan, hardware: HardwareProfile, samples: Sequence[Sample]
) -> Trace | None:
    """The trace with device seconds that leave a measured iteration time enough; None if they do.

    Ops that are watched one by one can take longer than in a row (clocks fall between them). An
    iteration shorter than predicted shows by how much: all else in it is known better.
    """
    if trace.device == "cpu":
        return None
    busy = sum(kernel_seconds(trace, plan))
    excess = simulate(trace, hardware, plan).seconds - min(sample.seconds for sample in samples)
    if not 0 < excess < _KERNELS_AT_MOST * busy or excess < _KERNELS_AGREE * busy:
        return None
    share = 1 - excess / busy
    return replace(trace, ops=tuple(faster(op, share) for op in trace.ops))


def faster(op: Op, share: float) -> Op:
    """The op with all that it takes on the device, whichever way it runs, times ``share``."""
    short = op.shortcut
    if short is not None:
        short = replace(short, device_seconds=short.device_seconds * share)
    ways = tuple(replace(it, device_seconds=it.device_seconds * share) for it in op.algorithms)
    return replace(op, device_seconds=op.device_seconds * share, algorithms=ways, shortcut=short)


def unhindered_seconds(trace: Trace) -> float:
    """What an iteration on a GPU takes at least: its kernels, or the host to issue its ops."""
    kernels = sum(op.device_seconds for op in trace.ops)
    return max(kernels, sum(op.host_seconds for op in trace.ops))


def with_gap_of(
    trace: Trace,
    plan: Plan,
    allocator: Allocator,
    measured: Measured,
    others: Sequence[tuple[float, bool]] = (),
) -> Allocator | None:
    """The allocator with the margin that an iteration under ``plan`` showed; None if it agrees.

    Where it had to flush its cache the margin was too small. The next one is tried, and where that
    is too small as well, the `roomiest`. Where it did not, a smaller one is worth trying if the
    plan loses time: what it reserved beyond what was allocated is all that the blocks of this plan
    need, and where that was set aside for it, half of the margin may do.

    Parameters
    ----------
    others
        Margins of plans that were measured before, and whether the allocator had to flush.
    """
    fraction = allocator.margin_fraction
    if measured.allocation_retries:
        again = any(flushed for _, flushed in others)
        roomier = roomiest(trace, plan, allocator, measured) if again else wider(allocator)
        more = roomier.margin_fraction
        enough = min((it for it, flushed in others if not flushed and it > fraction), default=None)
        if enough is not None:
            more = (fraction + enough) / 2
            if enough - more < _MARGIN_STEP:
                return None
        return replace(allocator, margin_fraction=more)
    peak = _moving_peak(trace, plan, allocator, measured)
    loses = plan.predicted_seconds > _LOSES * unhindered_seconds(trace)
    if not peak or not measured.reserved_bytes or not loses:
        return None
    lost = allocator.fraction_of(peak, measured.reserved_bytes)
    shown = max(MARGIN_AT_LEAST, 1.25 * lost + 0.02)
    too_small = max((it for it, flushed in others if flushed and it < fraction), default=0.0)
    half = max(_HALVED_AT_LEAST, (fraction + too_small) / 2)
    less = half if shown > half or shown <= too_small else shown
    return replace(allocator, margin_fraction=less) if fraction - less >= _MARGIN_STEP else None


def _moving_peak(trace: Trace, plan: Plan, allocator: Allocator, measured: Measured) -> int:
    """The peak measured, less what an optimizer's step is predicted to hold beyond all else."""
    held = curve(trace, plan, allocator)
    return measured.peak(Tier.DEVICE) - max(held, default=0) + moving_peak(trace, held)


def wider(allocator: Allocator) -> Allocator:
    """The allocator with the next margin to try where its own was too small."""
    fraction = max(MARGIN_AT_LEAST, 1.5 * allocator.margin_fraction + 0.02)
    return replace(allocator, margin_fraction=fraction)


def roomiest(trace: Trace, plan: Plan, allocator: Allocator, measured: Measured) -> Allocator:
    """The allocator with room for all that can be lacking where it had to flush its cache.

    That is what it held beside the largest piece that is asked for.
    """
    more, peak = wider(allocator), _moving_peak(trace, plan, allocator, measured)
    if not peak or not measured.reserved_bytes:
        return more
    beside = measured.reserved_bytes + _largest_piece(trace, plan)
    fraction = max(more.margin_fraction, allocator.fraction_of(peak, beside))
    return replace(allocator, margin_fraction=fraction)


def _largest_piece(trace: Trace, plan: Plan) -> int:
    """Most bytes that are asked for at once."""
    workspace = max(scratch(trace, plan, _EXACT), default=0)
    moving = (storage.nbytes for storage in trace.storages if not storage.persistent)
    return max(workspace, max(moving, default=0))


def with_peak_of(plan: Plan, allocator: Allocator, measured: Measured) -> Allocator | None:
    """The allocator with room for what a peak was above the predicted one; None if it has it.

    What issue order does not show is to fit the margin, with as much again for the blocks.
    """
    peak, predicted = measured.peak(Tier.DEVICE), plan.predicted_peak_bytes
    if 2 * (peak - predicted) <= plan.budget.device_bytes - predicted or peak <= predicted:
        return None
    return replace(allocator, margin_bytes=allocator.margin_bytes + peak - predicted)
