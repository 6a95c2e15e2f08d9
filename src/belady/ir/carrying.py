"""What a stretch holds between its steps and its stages, which a trace does not say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from belady.ir.ops import Op
from belady.ir.slicing import WHOLE, Draft, Rewriting
from belady.ir.stretches import Stretch
from belady.ir.trace import StorageKind, Trace


def modules_apart(trace: Trace, norms: Iterable[int]) -> frozenset[str]:
    """Modules around the batch norms ``norms``, whose calls are steps of their own."""
    found: set[str] = set()
    for at in norms:
        path = trace.ops[at].module
        while path:
            path = path.rpartition(".")[0]
            found.add(path)
    return frozenset(found | {trace.roots[trace.ops[at].pass_index] for at in norms})


def find_sums(trace: Trace, backward: Sequence[int], given: Iterable[int]) -> frozenset[int]:
    """Ops of ``backward`` that add gradients which come to one value from several ops.

    Parameters
    ----------
    given
        Gradients from outside.
    """
    born = {*given, *(value for at in backward for value in trace.ops[at].writes)}
    return frozenset(
        at
        for at in backward
        if trace.ops[at].name in ("aten.add.Tensor", "aten.add_.Tensor")
        and len(trace.ops[at].reads) == 2
        and born.issuperset(trace.ops[at].reads)
    )


def release_forward(writing: Rewriting, stretch: Stretch) -> None:
    """Let go after the last step that reads it of what only a forward taken apart would hold."""
    trace = writing.trace
    steps = _steps(trace, stretch)
    last = {
        trace.values[value].storage: step
        for step in steps
        for at in step
        for value in (*trace.ops[at].reads, *trace.ops[at].writes)
    }
    given, made = (trace.values[it].storage for it in (stretch.given, stretch.made))
    for storage, step in last.items():
        if storage in stretch.drawn | {made}:
            continue
        if storage != given and not _held_between(trace, stretch, step[-1], storage):
            continue
        for part in stretch.parts:
            draft = writing.sliced(storage, part)
            if draft is not None:
                places = (writing.places.get((at, part), -1) for at in step)
                draft.released = 1 + max(places)


def _steps(trace: Trace, stretch: Stretch) -> list[list[int]]:
    """Ops of each call: of a module that is called as a whole, or of a function."""
    found: list[list[int]] = []
    before = ""
    for at in stretch.forward:
        module = trace.ops[at].module
        if module != before or module in stretch.apart:
            found.append([])
        found[-1].append(at)
        before = module
    return found


def _held_between(trace: Trace, stretch: Stretch, at: int, storage: int) -> bool:
    """Whether a forward that is taken apart holds a storage beyond op ``at``, which is its last."""
    released = min(trace.storages[storage].released, stretch.forward[-1] + 1)
    if released <= at + 1:
        return False
    one, other = (trace.ops[it].module.split(".") for it in (at, released - 1))
    common = [a for a, b in zip(one, other, strict=False) if a == b]
    return one != other and ".".join(common) in {*stretch.apart, ""}


def gathered(writing: Rewriting, stretch: Stretch, part: int, like: Op, origin: int) -> list[Draft]:
    """Copy a slice of the gradient of what comes out, if its rows lie apart in the whole.

    Parameters
    ----------
    like, origin
        See `Rewriting.extra`.
    """
    if not stretch.scattered:
        return []
    whole = writing.value(stretch.gradient, WHOLE)
    index = writing.extra("clone.default", like, [whole], origin=origin)
    before = writing.draft(whole)
    nbytes = before.nbytes * stretch.size(part) // stretch.samples
    copy = writing.born(Draft(nbytes, before.device, StorageKind.ACTIVATION, index, part=part))
    writing.name(stretch.gradient, part, copy)
    return [writing.draft(copy)]


class Copies:
    """Writes the copies that modules of a later stage read of what an earlier one has."""

    def __init__(self, writing: Rewriting, stretch: Stretch) -> None:
        self._writing = writing
        self._stretch = stretch
        self._made: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        self._left: list[tuple[Draft, int]] = []
        self._steps = _steps(writing.trace, stretch)
        self._needs: dict[int, dict[int, bool]] = {}

    def copy(self, stage: int, part: int, like: Op) -> None:
        """At the beginning of a stage of a slice: copy, and read the copies from here on."""
        writing = self._writing
        made = self._made[stage, part] = []
        if stage not in self._needs:
            self._needs[stage] = self._read_by_modules(stage)
        for value, last in self._needs[stage].items():
            original = writing.value(value, part)
            writing.extra("clone.default", like, [original])
            before = writing.draft(original)
            copy = writing.born(replace(before, birth=len(writing.ops) - 1, released=-1))
            made.append((value, original, copy))
            writing.name(value, part, copy)
            if last:
                self._left.append((before, len(writing.ops)))
            for at in self._own(stage):
                writing.copies[value, part, at] = copy

    def done(self, stage: int, part: int) -> None:
        """At the end of it: the stage lets go of the copies."""
        writing, trace = self._writing, self._writing.trace
        for value, _, copy in self._made[stage, part]:
            step = next(
                step
                for step in reversed(self._steps)
                if self._stretch.stages[step[0]] == stage
                and any(value in trace.ops[at].reads for at in step)
            )
            places = (writing.places.get((at, part), -1) for at in step)
            writing.draft(copy).released = 1 + max(places)
        self.read(stage, part, copies=False)

    def read(self, stage: int, part: int, *, copies: bool) -> None:
        """From here on ops read the copies of a stage, or what was copied."""
        for value, original, copy in self._made[stage, part]:
            self._writing.name(value, part, copy if copies else original)

    def release(self) -> None:
        """What nothing reads any more once it is copied is let go of."""
        for draft, boundary in self._left:
            draft.released = boundary

    def _read_by_modules(self, stage: int) -> dict[int, bool]:
        """Values from earlier stages, and whether no later stage reads them."""
        stretch, ops = self._stretch, self._writing.trace.ops
        stages = stretch.stages
        earlier = {v for at in stretch.forward if stages[at] < stage for v in ops[at].writes}
        if stage and stretch.passed_on >= 0:
            earlier.add(stretch.given)
        found = dict.fromkeys(
            value
            for at in self._own(stage)
            if ops[at].module not in stretch.apart
            for value in ops[at].reads
            if value in earlier and self._is_sliced(value)
        )
        later = {value for at in stretch.forward if stages[at] > stage for value in ops[at].reads}
        return {value: value not in later for value in found}

    def _own(self, stage: int) -> list[int]:
        stages, norms = self._stretch.stages, self._stretch.norms
        return [at for at in self._stretch.forward if stages[at] == stage and at not in norms]

    def _is_sliced(self, value: int) -> bool:
        storage = self._writing.trace.values[value].storage
        return self._writing.sliced(storage, self._stretch.parts[0]) is not None


class Sums:
    """Writes what becomes of gradients that come from a later stage."""

    def __init__(self, writing: Rewriting, stretch: Stretch) -> None:
        self._writing = writing
        self._stretch = stretch
        self._producer = {
            value: at for at in stretch.backward for value in writing.trace.ops[at].writes
        }

    def late(self, ops: Sequence[int]) -> list[int]:
        """Sums among ``ops`` of a stage whose results no other op of the stage reads."""
        trace, others = self._writing.trace, set(ops)
        found: list[int] = []
        for at in reversed(ops):
            (result,) = trace.ops[at].writes if at in self._stretch.sums else (-1,)
            if result >= 0 and others.isdisjoint(use.op for use in trace.values[result].uses):
                found.append(at)
                others.discard(at)
        return found[::-1]

    def carried(self, ops: Sequence[int], part: int) -> list[Draft]:
        """Gradients from later stages that ``ops`` of one stage read."""
        writing, stages = self._writing, self._stretch.stages
        return [
            writing.draft(writing.value(value, part))
            for at in ops
            for value in writing.trace.ops[at].reads
            if value in self._producer
            and stages[self._producer[value]] != stages[at]
            and writing.draft(writing.value(value, part)).part == part
        ]

    def issues(self, at: int, part: int) -> bool:
        """Issue op ``at`` if it adds to a gradient that is held meanwhile: into a new tensor."""
        op = self._writing.trace.ops[at]
        from_outside = self._stretch.gradient in op.reads
        if at not in self._stretch.sums or not (from_outside or self.carried([at], part)):
            return False
        self._add(at, op, part)
        return True

    def add_late(self, sums: Sequence[int], part: int) -> None:
        """Add what a stage passes on; what is added up goes, its caller holds the other."""
        writing = self._writing
        for at in sums:
            held = self.carried([at], part)
            self._add(at, writing.trace.ops[at], part)
            for draft in held:
                draft.released = len(writing.ops)

    def _add(self, at: int, op: Op, part: int) -> None:
        writing, old = self._writing, op.writes[0]
        reads = [writing.value(value, part) for value in op.reads]
        storage = writing.trace.values[old].storage
        like = next(it for it in map(writing.draft, reads) if it.part == part)
        index = writing.extra("add.Tensor", replace(op, module=self._stretch.parent), reads)
        draft = Draft(like.nbytes, like.device, like.kind, index, storage, part)
        writing.name(old, part, writing.born(draft))
        writing.places[at, part] = index
