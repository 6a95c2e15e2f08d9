"""How much memory torch's allocator reserves for a plan: its blocks, cut and joined as it does.

What a plan holds follows from issue order alone, and so does where torch puts it. A stretch of
memory is simulated as expandable segments have it (PyTorch, c10/cuda/CUDACachingAllocator.cpp): a
block goes into the smallest hole that holds it, the rest of the hole stays one, neighbours that are
free become one, and what fits nowhere is mapped at the end. What that reserves beyond the bytes
held is lost between blocks, or in holes too small for a large one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

from belady.ir.codecs import passes
from belady.ir.curves import managed_room, tier_curve
from belady.ir.hardware import Allocator
from belady.ir.plan import Encode, Plan, Recompute
from belady.ir.residency import Interval, intervals
from belady.ir.scratch import ReplayStep, chosen_workspaces, replay_steps
from belady.ir.trace import StorageKind, Tier, Trace

# Smaller ones come from segments of their own, in all a few MiB.
_SMALL = 1 << 20
# What is left of a hole is one again, down to this size.
_LEAST = 512
# After so many iterations the next ones find what the last one did.
_ITERATIONS = 2
# What is simulated leaves so much of a budget at least: small blocks are not.
_AGREES = 1.02
# Part of the budget that memory apart for gradients may cost.
_APART_COSTS = 0.05


def reserved_bytes(trace: Trace, plan: Plan, allocator: Allocator, *, gradients_apart: bool) -> int:
    """Bytes that torch's allocator reserves in iterations under ``plan``, if nothing stops it.

    Where that is more than its cap, it flushes its cache in every iteration, or is out of memory.

    Parameters
    ----------
    gradients_apart
        Whether gradients have memory of their own, which is idle while there are none.
    """
    lasting, steps = _steps(trace, plan, allocator, gradients_apart)
    stretch = _Stretch()
    for _ in range(_ITERATIONS):
        where: dict[int, int] = {}
        for step in steps:
            for block in step.freed:
                if block in where:
                    stretch.free(where.pop(block))
            for block, nbytes in step.back:
                where[block] = stretch.take(nbytes)
            for replay in sorted(step.replays):
                stretch.run(replay, where)
            for block, nbytes in step.born:
                where[block] = stretch.take(nbytes)
            stretch.take_for_now(step.workspace)
    return lasting + stretch.end + managed_room(trace, plan, allocator)


class InBlocks(NamedTuple):
    """What torch's allocator is foretold to reserve, and whether gradients are apart for it."""

    nbytes: int
    gradients_apart: bool


def in_blocks(trace: Trace, plan: Plan, allocator: Allocator) -> InBlocks:
    """Foretell `reserved_bytes`, and where gradients should be.

    Among the rest they leave it in pieces; apart they are idle in forward, which can be more. Under
    a plan that moves nothing they stay where they are, and where they have to for it to fit.
    """
    among = reserved_bytes(trace, plan, allocator, gradients_apart=False)
    if plan.moves_nothing:
        return InBlocks(among, False)
    apart = reserved_bytes(trace, plan, allocator, gradients_apart=True)
    budget = plan.budget.device_bytes
    saves = _needed(among, allocator) <= budget < _needed(apart, allocator)
    costs = saves or among < apart - _APART_COSTS * budget
    return InBlocks(among, False) if costs else InBlocks(apart, True)


def gradient_bytes(trace: Trace, plan: Plan, least: int) -> int:
    """Most bytes of gradients larger than ``least`` bytes that are on the device at once."""
    found = _gradients(trace, intervals(trace, plan))
    return _at_once([span for span in found if span.nbytes > least], len(trace.ops))


def _gradients(trace: Trace, spans: Iterable[Interval]) -> list[Interval]:
    return [it for it in spans if trace.storages[it.storage].kind is StorageKind.GRADIENT]


def _at_once(spans: list[Interval], length: int) -> int:
    return max(tier_curve(spans, Tier.DEVICE, length), default=0)


def excess(trace: Trace, plan: Plan, allocator: Allocator) -> float:
    """By how much torch's allocator is foretold to be over the budget of ``plan``: 0.1 is a tenth.

    Where that is positive it is likely to flush its cache in every iteration. 0 for an allocator
    that states no margin: it is taken to lose nothing between blocks.
    """
    if allocator.margin_fraction <= 0:
        return 0.0
    nbytes = in_blocks(trace, plan, allocator).nbytes
    return _needed(nbytes, allocator) / plan.budget.device_bytes - 1


def _needed(nbytes: int, allocator: Allocator) -> float:
    """What is simulated, and what is not: small blocks, and whole pages, which torch maps.

    Nothing for what is there all the time.
    """
    moving = max(0, nbytes - allocator.settled_bytes)
    return nbytes + max((_AGREES - 1) * moving, allocator.margin_bytes)


class _Again(NamedTuple):
    """A replay, or a value that is encoded or decoded, and its block.

    Those at one boundary are in the order in which their readers ask for them: that of the ops of
    forward that made them.
    """

    order: int
    block: int
    nbytes: int
    steps: list[ReplayStep]


class _Step(NamedTuple):
    """What is taken and given back around one op, in this order; blocks by number, with bytes.

    ``back`` has copies alone, in the order of the plan, as engines issue them; what is made again
    is placed where its replay makes it.
    """

    freed: list[int]
    back: list[tuple[int, int]]
    replays: list[_Again]
    born: list[tuple[int, int]]
    workspace: list[int]


def _steps(
    trace: Trace, plan: Plan, allocator: Allocator, gradients_apart: bool
) -> tuple[int, list[_Step]]:
    """Bytes that are there all the time, and what goes on at each op and after the last."""
    end = len(trace.ops)
    steps = [_Step([], [], [], [], []) for _ in range(end + 1)]
    spans, decisions = intervals(trace, plan), plan.decisions
    issued = {value: order for order, value in enumerate(decisions)}
    spans.sort(key=lambda span: issued.get(span.value, -1))
    lasting = _at_once(_gradients(trace, spans), end) if gradients_apart else 0
    for block, span in enumerate(spans):
        start, over = min(span.start, end), min(span.end, end)
        if span.tier is not Tier.DEVICE or start >= over:
            continue
        nbytes, storage = allocator.held(span.nbytes), trace.storages[span.storage]
        gradient = storage.kind is StorageKind.GRADIENT
        if gradient and gradients_apart:
            # It is copied from where it was made.
            steps[start].workspace.append(nbytes)
        elif storage.persistent and not gradient:
            lasting += nbytes
        elif isinstance(again := decisions.get(span.value), Recompute | Encode):
            run = _making(trace, span.value, again, allocator)
            order = trace.values[span.value].producer
            steps[start].replays.append(_Again(order, block, nbytes, run))
            steps[over].freed.append(block)
        elif nbytes > _SMALL:
            taken = steps[start].born if span.value < 0 else steps[start].back
            taken.append((block, nbytes))
            steps[over].freed.append(block)
    chosen = chosen_workspaces(trace, plan)
    for index, op in enumerate(trace.ops):
        steps[index].workspace.append(allocator.held(chosen.get(index, op.workspace_bytes)))
    return lasting, steps


def _making(
    trace: Trace, value: int, decision: Recompute | Encode, allocator: Allocator
) -> list[ReplayStep]:
    if isinstance(decision, Recompute):
        return replay_steps(trace, value, decision, allocator)
    nbytes = trace.storages[trace.values[value].storage].nbytes
    return [ReplayStep([], allocator.held(passes(decision, nbytes).scratch), [], 0)]


class _Stretch:
    """Memory that grows at its end.

    Attributes
    ----------
    end
        Bytes mapped so far.
    """

    def __init__(self) -> None:
        self.end = 0
        self._holes: dict[int, int] = {}  # bytes by address
        self._before: dict[int, int] = {}  # address by end
        self._by_size: list[tuple[int, int]] = []
        self._taken: dict[int, int] = {}

    def take(self, nbytes: int) -> int:
        """Address of a block; the hole at the end, which can grow, comes last."""
        for index in range(bisect_left(self._by_size, (nbytes, -1)), len(self._by_size)):
            size, address = self._by_size[index]
            if address + size < self.end:
                break
        else:
            address = self._before.get(self.end, self.end)
            size = max(self._holes.get(address, 0), nbytes)
        self._fill(address)
        self.end = max(self.end, address + size)
        rest = size - nbytes
        if rest >= _LEAST:
            self._open(address + nbytes, rest)
            size = nbytes
        self._taken[address] = size
        return address

    def free(self, address: int) -> None:
        """Give a block back; it becomes one with the holes beside it."""
        size = self._taken.pop(address)
        if address + size in self._holes:
            size += self._fill(address + size)
        if address in self._before:
            before = self._before[address]
            size += self._fill(before)
            address = before
        self._open(address, size)

    def run(self, replay: _Again, where: dict[int, int]) -> None:
        """Take and give back what a replay does, and note ``where`` the block of its value is."""
        beside: dict[int, int] = {}
        for step in replay.steps:
            for place, (storage, nbytes) in enumerate((*step.taken, (-1, 0))):
                if place == step.makes and replay.nbytes > _SMALL:
                    where[replay.block] = self.take(replay.nbytes)
                if nbytes > _SMALL:
                    beside[storage] = self.take(nbytes)
            self.take_for_now([step.workspace])
            for storage, _ in step.freed:
                if storage in beside:
                    self.free(beside.pop(storage))

    def take_for_now(self, sizes: Iterable[int]) -> None:
        """Take blocks one after another, and give all back."""
        taken = [self.take(nbytes) for nbytes in sizes if nbytes > _SMALL]
        for address in taken:
            self.free(address)

    def _open(self, address: int, size: int) -> None:
        self._holes[address] = size
        self._before[address + size] = address
        insort(self._by_size, (size, address))

    def _fill(self, address: int) -> int:
        """Take a hole away, if there is one; gives its bytes."""
        size = self._holes.pop(address, 0)
        if size:
            del self._before[address + size]
            self._by_size.pop(bisect_left(self._by_size, (size, address)))
        return size
