"""Writes one stretch of a trace in slices, op by op as `belady.sections` executes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from belady.ir.carrying import Copies, Sums, gathered, release_forward
from belady.ir.drawing import Drawing
from belady.ir.ops import Op
from belady.ir.slicing import WHOLE, Draft, Rewriting
from belady.ir.stretches import Stretch
from belady.ir.trace import Storage, StorageKind

_HALF = frozenset({"float16", "bfloat16"})


class Cut:
    """Writes the ops of one stretch."""

    def __init__(self, writing: Rewriting, stretch: Stretch) -> None:
        self.writing = writing
        self.stretch = stretch
        self.old = writing.trace
        self.device = self._storage(stretch.made).device
        self.node = -1
        self.lasting: list[Draft] = []
        self.sums = Sums(writing, stretch)
        self.copied = Copies(writing, stretch)
        self.drawing = Drawing(writing, stretch.draws, stretch.drawn, stretch.parts)

    # -- forward -----------------------------------------------------------------------------

    def forward(self) -> int:
        """Issue the slices forward; gives the old op that comes next."""
        stretch, writing = self.stretch, self.writing
        like = self._like(stretch.forward[0])
        self.node = writing.extra("empty.memory_format", like)
        token = writing.born(self._draft(0))
        joined = -1
        for stage in range(max(stretch.stages.values()) + 1):
            ops = [at for at in stretch.forward if stretch.stages[at] == stage]
            norm = [at for at in ops if at in stretch.norms]
            if norm:
                self._statistics(norm, like)
            for part in stretch.parts:
                if norm:
                    self._normalise(norm, part, like)
                else:
                    self._cut(part, like)
                self.copied.copy(stage, part, like)
                self._issue([at for at in ops if at not in stretch.norms], part)
                self.copied.done(stage, part)
                if stage == stretch.stages[stretch.forward[-1]]:
                    joined = self._join(stretch.made, part, joined, like)
        release_forward(writing, stretch)
        self.copied.release()
        writing.draft(token).released = len(writing.ops)
        if stretch.passed_on >= 0 or stretch.norms:
            self._lasting(token)
        writing.name(stretch.made, WHOLE, joined)
        writing.ended(stretch.forward)
        return stretch.forward[-1] + 1

    def _cut(self, part: int, like: Op) -> None:
        writing, given = self.writing, self.stretch.given
        whole = writing.value(given, WHOLE)
        writing.extra("slice.Tensor", like, [whole])
        if not self.stretch.copies:
            return
        writing.extra("clone.default", like, [whole])
        copy = writing.born(self._draft(self._share(given, part)))
        writing.name(given, part, copy)
        if self.stretch.passed_on >= 0:
            writing.extra("view.default", like, [copy])

    def _issue(self, ops: Sequence[int], part: int) -> None:
        for at in ops:
            op = self.old.ops[at]
            if "_to_copy" in op.name and all(self._storage(value).persistent for value in op.reads):
                # Autocast keeps the first.
                if part == self.stretch.parts[0]:
                    self.writing.copy(at)
                continue
            if self.drawing.issues(at, part, self._share(op.writes[0], part) if op.writes else 0):
                continue
            if self.sums.issues(at, part):
                continue
            self.drawing.cut(at)
            index = self.writing.issue(
                at, part, self.stretch.size(part), self.stretch.samples, self.stretch.full
            )
            if op.module in self.stretch.apart:
                # Its forward does not run: what it calls is called in its place.
                ops_ = self.writing.ops
                ops_[index] = replace(ops_[index], module=self.stretch.parent)
            self.drawing.used(at, part)

    def _join(self, old: int, part: int, whole: int, like: Op, origin: int | None = None) -> int:
        """Copy a slice into its place; gives the value that ``whole`` is then."""
        writing = self.writing
        if part == self.stretch.parts[0]:
            writing.extra("empty_strided.default", like, origin=origin)
            storage = self.old.values[old].storage
            whole = writing.born(self._draft(self._storage(old).nbytes, storage))
        writing.extra("slice.Tensor", like, [whole], origin=origin)
        own = writing.value(old, part)
        writing.extra("copy_.default", like, [whole, own], origin=origin)
        writing.draft(own).released = len(writing.ops)
        return writing.rewritten(writing.values[whole].storage)

    # -- batch norms -------------------------------------------------------------------------

    def _statistics(self, norm: Sequence[int], like: Op) -> None:
        writing = self.writing
        op, *others = self._norm(norm)
        for at in others:
            if self.old.ops[at].mutates:
                writing.copy(at)
        (given, *_), (_, *kept) = self.old.ops[op].reads, self.old.ops[op].writes
        parts = [writing.value(given, part) for part in self.stretch.parts]
        for value in parts:
            writing.extra("var_mean.correction", like, [value])
        writing.extra("rsqrt.default", like)
        for old in kept[:2]:
            storage = self.old.values[old].storage
            new = writing.born(self._draft(self._storage(old).nbytes, storage))
            writing.name(old, WHOLE, new)
            self._lasting(new)

    def _norm(self, norm: Sequence[int]) -> list[int]:
        """The op that normalises, then the others of its module."""
        return sorted(norm, key=lambda at: "batch_norm" not in self.old.ops[at].name)

    def _normalise(self, norm: Sequence[int], part: int, like: Op) -> None:
        writing = self.writing
        at = self._norm(norm)[0]
        (given, *others), (made, *_) = self.old.ops[at].reads, self.old.ops[at].writes
        reads = [given, *(value for value in others if writing.is_parameter(value))]
        index = writing.extra("sub.Tensor", like, [writing.value(value, part) for value in reads])
        self._costs(index, at, part, self._scratch(at, part, 1))
        self._named(made, part)
        writing.places[at, part] = index
        writing.extra("view.default", like, [writing.value(made, part)])

    def _norm_backward(self, at: int, sums: Sequence[int], like: Op) -> None:
        writing, stretch = self.writing, self.stretch
        op = self.old.ops[at]
        assert op.forward_op is not None
        given, gradient = self.old.ops[op.forward_op].reads[0], op.reads[0]
        parts = stretch.parts
        pairs = {
            part: [writing.value(given, part), writing.value(gradient, part)] for part in parts
        }
        for part in parts:
            index = writing.extra("mul.Tensor", like, pairs[part], origin=self.node)
            centred = self._draft(max(self._share(given, part), self._precise(given, part)))
            writing.draft(writing.born(centred)).released = index + 1
            writing.places[at, -2 - part] = index
        writing.extra("sum.dim_IntList", like, origin=self.node)
        passed_on = []
        for old in op.writes:
            storage = self.old.values[old].storage
            if storage in stretch.totals:
                nbytes = self._storage(old).nbytes
                writing.name(old, WHOLE, writing.born(self._draft(nbytes, storage)))
            elif self._storage(old).nbytes:
                passed_on.append(old)
        for part in parts if passed_on else ():
            index = writing.extra("sub.Tensor", like, pairs[part], origin=self.node)
            self._costs(index, at, part, self._scratch(op.forward_op, part, 2))
            self._named(passed_on[0], part)
            writing.places[at, part] = index
            self._done_with(gradient, part)
            self.sums.add_late(sums, part)

    def _done_with(self, gradient: int, part: int) -> None:
        draft = self.writing.draft(self.writing.value(gradient, part))
        if draft.part == part:
            draft.released = len(self.writing.ops)

    def _costs(self, index: int, at: int, part: int, workspace: int) -> None:
        seconds = self.old.ops[at].device_seconds * self.stretch.size(part) / self.stretch.samples
        op = self.writing.ops[index]
        self.writing.ops[index] = replace(op, device_seconds=seconds, workspace_bytes=workspace)

    def _scratch(self, norm: int, part: int, vectors: int) -> int:
        """What a slice's arithmetic takes: so many vectors of one number a channel at least."""
        (given, *_), (_, mean, *_) = self.old.ops[norm].reads, self.old.ops[norm].writes
        return self._precise(given, part) or vectors * self._storage(mean).nbytes

    def _precise(self, value: int, part: int) -> int:
        """Scratch bytes of a batch norm's arithmetic: half precision is widened to float32."""
        half = any(save.dtype in _HALF for save in self.old.values[value].saves)
        return 2 * self._share(value, part) if half else 0

    # -- backward ----------------------------------------------------------------------------

    def backward(self) -> int:
        """Issue the slices backward; gives the old op that comes next."""
        stretch, writing = self.stretch, self.writing
        like = self._like(stretch.backward[0])
        for _ in stretch.sizes:
            gradient = writing.value(stretch.gradient, WHOLE)
            writing.extra("slice.Tensor", like, [gradient], origin=self.node)
        joined = -1
        totals: dict[int, int] = {}
        for stage in range(max(stretch.stages.values()), -1, -1):
            ops = [at for at in stretch.backward if stretch.stages[at] == stage]
            back = [at for at in ops if self.old.ops[at].forward_op in stretch.norms]
            norm = [at for at in back if at not in stretch.sums]
            after = [at for at in back if norm and at > norm[0] and at in stretch.sums]
            own = [at for at in ops if at not in (*norm, *after)]
            late = self.sums.late(own)
            own = [at for at in own if at not in late]
            for part in stretch.parts:
                carried = gathered(writing, stretch, part, like, self.node)
                carried += self.sums.carried(own, part)
                self.copied.read(stage, part, copies=True)
                self._issue(own, part)
                self.copied.read(stage, part, copies=False)
                for draft in carried:
                    # Whoever asks autograd for gradients holds what it starts from.
                    draft.released = len(writing.ops)
                added = self._totals(own)
                for old in added:
                    self._add(old, part, totals, like)
                self.sums.add_late(late, part)
                for old in added if part != stretch.parts[0] else ():
                    writing.draft(writing.value(old, part)).released = len(writing.ops)
                if not stage and stretch.passed_on >= 0:
                    joined = self._join(stretch.passed_on, part, joined, like, self.node)
            for at in norm:
                self._norm_backward(at, after, like)
        for old, total in totals.items():
            writing.name(old, WHOLE, total)
        if stretch.passed_on >= 0:
            writing.name(stretch.passed_on, WHOLE, joined)
        writing.ended(stretch.backward)
        for draft in self.lasting:
            draft.released = len(writing.ops)
        done = set(stretch.backward)
        for at in range(stretch.backward[0], stretch.backward[-1] + 1):
            if at not in done:
                writing.copy(at)
        return stretch.backward[-1] + 1

    def _totals(self, ops: Sequence[int]) -> list[int]:
        """Gradients of parameters that ``ops`` make, in the order in which the modules ran."""
        first: dict[str, int] = {}
        for at in self.stretch.forward:
            first.setdefault(self.old.ops[at].module, at)
        found = [
            (first.get(self.old.ops[at].module, -1), at, position, old)
            for at in ops
            for position, old in enumerate(self.old.ops[at].writes)
            if self.old.values[old].storage in self.stretch.totals
        ]
        return [old for *_, old in sorted(found)]

    def _add(self, old: int, part: int, totals: dict[int, int], like: Op) -> None:
        writing = self.writing
        share = writing.value(old, part)
        if part == self.stretch.parts[0]:
            totals[old] = share
        elif part == self.stretch.parts[1]:
            writing.extra("add.Tensor", like, [totals[old], share], origin=self.node)
            writing.draft(totals[old]).released = len(writing.ops)
            storage = self.old.values[old].storage
            totals[old] = writing.born(self._draft(self._storage(old).nbytes, storage))
        else:
            writing.extra("add_.Tensor", like, [totals[old], share], origin=self.node)
            totals[old] = writing.rewritten(writing.values[totals[old]].storage)

    # -- small things ------------------------------------------------------------------------

    def _like(self, at: int) -> Op:
        return replace(self.old.ops[at], module=self.stretch.parent)

    def _lasting(self, value: int) -> None:
        """What the call holds until its backward is over."""
        self.lasting.append(self.writing.draft(value))

    def _storage(self, value: int) -> Storage:
        return self.old.storages[self.old.values[value].storage]

    def _share(self, value: int, part: int) -> int:
        return self._storage(value).nbytes * self.stretch.size(part) // self.stretch.samples

    def _named(self, old: int, part: int) -> None:
        """The op issued last makes slice ``part`` of value ``old``."""
        draft = self._draft(self._share(old, part), self.old.values[old].storage, part)
        self.writing.name(old, part, self.writing.born(draft))

    def _draft(self, nbytes: int, origin: int = -1, part: int = WHOLE) -> Draft:
        kind = self.old.storages[origin].kind if origin >= 0 else StorageKind.ACTIVATION
        return Draft(nbytes, self.device, kind, len(self.writing.ops) - 1, origin, part)
