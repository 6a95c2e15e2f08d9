"""How much memory torch's allocator reserves for a plan: its blocks, cut and joined as it does.

What a plan holds follows from issue order alone, and so does where torch puts it. A stretch of
memory is simulated as expandable segments have it (PyTorch, c10/cuda/CUDACachingAllocator.cpp): a
block goes into the smallest hole that holds it, the rest of the hole stays one, neighbours that are
free become one, and what fits nowhere is mapped at the end. What that reserves beyond the bytes
held is lost between blocks, or in holes too small for a large one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from belady.ir.codecs import passes
from belady.ir.curves import managed_room, tier_curve
from belady.ir.hardware import Allocator
from belady.ir.plan import Encode, Plan, Recompute
from belady.ir.replay import at_once
from belady.ir.residency import Interval, intervals
from belady.ir.scratch import ReplayStep, chosen_workspaces, steps_of
from belady.ir.trace import StorageKind, Tier, Trace
from belady.simulate.stretch import SMALL, Event, end_of

# Blocks of up to so many bytes that may be elsewhere, too.
_ELSEWHERE = (4 << 20, 16 << 20)
# Number of the first block that is taken for one op alone, and those after it are below.
_FOR_NOW = -(1 << 40)
# What is simulated leaves so much of a budget at least: small blocks are not.
_AGREES = 1.02
# Part of the budget that memory apart for gradients may cost.
_APART_COSTS = 0.05


class Blocks(NamedTuple):
    """What is there all the time, in bytes, and the blocks of an iteration, as they come and go."""

    lasting: int
    events: list[Event]

    def reserved_bytes(self) -> int:
        """Bytes that torch's allocator reserves in iterations, if nothing stops it.

        Where that is more than its cap, it flushes its cache in every iteration, or is out of
        memory.
        """
        return self.lasting + end_of(self.events, SMALL)

    def held_bytes(self) -> int:
        """The most that is held at once, were nothing lost between blocks."""
        sizes: dict[int, int] = {}
        held = most = 0
        for block, nbytes in self.events:
            held += nbytes - sizes.pop(block, 0)
            if nbytes:
                sizes[block] = nbytes
            most = max(most, held)
        return self.lasting + most

    def most_bytes(self, reserved: int) -> int:
        """The most that it may reserve, which is ``reserved`` at least.

        Where small blocks lie decides where large ones fit, and nobody foretells it: some find room
        in what was there before. So it is the most that is needed without those of some size.
        """
        found = (self.lasting + end_of(self.events, least) for least in _ELSEWHERE)
        return max(reserved, *found)


class InBlocks(NamedTuple):
    """What torch's allocator is foretold to reserve, and whether gradients are apart for it."""

    nbytes: int
    gradients_apart: bool


def in_blocks(trace: Trace, plan: Plan, allocator: Allocator) -> InBlocks:
    """Foretell the most that is reserved, and where gradients should be.

    Among the rest they leave it in pieces; apart they are idle in forward, which can be more. Under
    a plan that moves nothing they stay where they are, and where they have to for it to fit: a
    flush gives pieces back, but not what is idle.
    """
    beside = managed_room(trace, plan, allocator)
    walk = walked(trace, plan, allocator)
    among = blocks_of(walk, gradients_apart=False)
    here = among.reserved_bytes()
    if plan.moves_nothing:
        return InBlocks(among.most_bytes(here) + beside, False)
    apart = blocks_of(walk, gradients_apart=True)
    there, budget = apart.reserved_bytes(), plan.budget.device_bytes - beside
    saves = _needed(here, allocator) <= budget < _needed(there, allocator)
    saves |= _needed(apart.held_bytes(), allocator) > budget
    if saves or here < there - _APART_COSTS * budget:
        return InBlocks(among.most_bytes(here) + beside, False)
    return InBlocks(apart.most_bytes(there) + beside, True)


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

    None of the former for what is there all the time.
    """
    moving = max(0, nbytes - allocator.settled_bytes)
    return nbytes + (_AGREES - 1) * moving + allocator.margin_bytes


class _Again(NamedTuple):
    """A replay, or a value that is encoded or decoded, and the blocks of the values that it makes.

    Those at one boundary are in the order in which their readers ask for them: that of the ops of
    forward that made them.
    """

    order: int
    blocks: Mapping[int, Event]
    steps: list[ReplayStep]


class _Step(NamedTuple):
    """What is taken and given back around one op, in this order; blocks by number, with bytes.

    ``back`` has copies alone, in the order of the plan, as engines issue them; what is made again
    is placed where its replay makes it.
    """

    freed: list[int]
    back: list[Event]
    replays: list[_Again]
    born: list[Event]
    workspace: list[int]


class Walk(NamedTuple):
    """What comes and goes in an iteration, wherever gradients are.

    Attributes
    ----------
    lasting, gradient_bytes
        Bytes that are there all the time, and those for gradients where they are apart.
    steps
        At each op and after the last, without gradients.
    born, freed
        Blocks of gradients by step.
    """

    lasting: int
    gradient_bytes: int
    steps: list[_Step]
    born: dict[int, list[Event]]
    freed: dict[int, list[int]]


def walked(trace: Trace, plan: Plan, allocator: Allocator) -> Walk:
    """Go through an iteration under ``plan``."""
    end = len(trace.ops)
    steps = [_Step([], [], [], [], []) for _ in range(end + 1)]
    spans, decisions = intervals(trace, plan), plan.decisions
    issued = {value: order for order, value in enumerate(decisions)}
    spans.sort(key=lambda span: issued.get(span.value, -1))
    walk = Walk(0, _at_once(_gradients(trace, spans), end), steps, {}, {})
    lasting, made = 0, dict[int, tuple[int, Event]]()
    for block, (tier, owner, value, start, over, asked, _) in enumerate(spans):
        start, over = min(start, end), min(over, end)
        if tier is not Tier.DEVICE or start >= over:
            continue
        nbytes, storage = allocator.held(asked), trace.storages[owner]
        gradient = storage.kind is StorageKind.GRADIENT
        if storage.persistent and not gradient:
            lasting += nbytes
            continue
        again = decisions.get(value)
        if nbytes <= SMALL and not isinstance(again, Recompute):
            continue
        if gradient:
            walk.born.setdefault(start, []).append((block, nbytes))
            walk.freed.setdefault(over, []).append(block)
            continue
        if isinstance(again, Recompute):
            made[value] = start, (block, nbytes)
        elif isinstance(again, Encode):
            steps[start].replays.append(_coded(trace, value, again, (block, nbytes), allocator))
        else:
            taken = steps[start].born if value < 0 else steps[start].back
            taken.append((block, nbytes))
        steps[over].freed.append(block)
    for replays in at_once(trace, decisions):
        _replay(trace, steps, replays, made, allocator)
    chosen = chosen_workspaces(trace, plan)
    for index, op in enumerate(trace.ops):
        nbytes = chosen.get(index, op.workspace_bytes)
        if nbytes > SMALL:
            steps[index].workspace.append(allocator.held(nbytes))
    return walk._replace(lasting=lasting)


def _replay(
    trace: Trace,
    steps: Sequence[_Step],
    replays: Sequence[tuple[int, Recompute]],
    made: Mapping[int, tuple[int, Event]],
    allocator: Allocator,
) -> None:
    """Have replays that share what they make run where their values, by number, come back."""
    blocks = {trace.values[v].storage: made[v][1] for v, _ in replays if v in made}
    for (value, _), run in zip(replays, steps_of(trace, replays, allocator), strict=True):
        if value in made:
            again = _Again(trace.values[value].producer, blocks, run)
            steps[made[value][0]].replays.append(again)


def blocks_of(walk: Walk, *, gradients_apart: bool) -> Blocks:
    """The blocks of an iteration.

    Parameters
    ----------
    gradients_apart
        Whether gradients have memory of their own, which is idle while there are none.
    """
    found: list[Event] = []
    for at, step in enumerate(walk.steps):
        born, freed, workspace = step.born, step.freed, step.workspace
        if gradients_apart:
            # They are copied from where they were made.
            workspace = [*(nbytes for _, nbytes in walk.born.get(at, ())), *workspace]
        else:
            # Those of one boundary in the order of storages.
            born = sorted([*walk.born[at], *born]) if at in walk.born else born
            freed = sorted([*walk.freed[at], *freed]) if at in walk.freed else freed
        found += ((block, 0) for block in freed)
        found += step.back
        for replay in sorted(step.replays, key=attrgetter("order")):
            found += _during(replay)
        found += born
        if workspace:
            found += _for_now(workspace)
    return Blocks(walk.lasting + (walk.gradient_bytes if gradients_apart else 0), found)


def _coded(
    trace: Trace, value: int, decision: Encode, block: Event, allocator: Allocator
) -> _Again:
    storage = trace.values[value].storage
    scratch = passes(decision, trace.storages[storage].nbytes).scratch
    step = ReplayStep([], allocator.held(scratch), [], [(0, storage)])
    return _Again(trace.values[value].producer, {storage: block}, [step])


def _during(replay: _Again) -> Iterator[Event]:
    """The blocks of a replay: those of values stay, what it makes beside is given back."""
    for step in replay.steps:
        # Numbers below 0 are of no value's block.
        taken = [(-2 - storage, nbytes) for storage, nbytes in step.taken]
        for before, storage in reversed(step.values):
            if storage in replay.blocks:
                taken.insert(before, replay.blocks[storage])
        yield from taken
        if step.workspace > SMALL:
            yield from _for_now([step.workspace])
        yield from ((-2 - storage, 0) for storage, _ in step.freed)


def _for_now(sizes: Iterable[int]) -> list[Event]:
    """Blocks that are taken one after another, and then all given back."""
    taken = [(_FOR_NOW - place, nbytes) for place, nbytes in enumerate(sizes)]
    return [*taken, *((number, 0) for number, _ in taken)]
