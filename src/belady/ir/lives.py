"""Saves, lifetimes and anchors of a trace that is written anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from belady.errors import PlanMismatchError
from belady.ir.slicing import WHOLE, Draft, Rewriting
from belady.ir.stretches import Stretch
from belady.ir.trace import Save, Storage, Trace, Value
from belady.ir.undivided import batch_dim


class Lives:
    """What is saved and how long it lives, once all ops are issued.

    Parameters
    ----------
    runs
        The runs that are cut into slices.
    """

    def __init__(self, writing: Rewriting, stretches: Sequence[Stretch]) -> None:
        self.writing = writing
        self.old = writing.trace
        self.stretches = stretches
        self.stretch_of = {
            at: stretch for stretch in stretches for at in (*stretch.forward, *stretch.backward)
        }
        self.saves: dict[int, list[Save]] = {}
        self.drops: dict[int, int] = {}
        self._save_all()

    def trace(self) -> Trace:
        """The whole of it."""
        values = tuple(
            Value(
                value.storage,
                value.version,
                value.producer,
                tuple(value.uses),
                tuple(self.saves.get(index, ())),
            )
            for index, value in enumerate(self.writing.values)
        )
        anchors = {
            boundary
            for saves in self.saves.values()
            for save in saves
            for boundary in (save.packed, *save.reads[:1])
        }
        return replace(
            self.old,
            ops=tuple(self.writing.ops),
            storages=tuple(
                self._storage(index, draft) for index, draft in enumerate(self.writing.storages)
            ),
            values=values,
            anchors=tuple(sorted(anchors)) if self.old.anchors else (),
        )

    # -- saves -------------------------------------------------------------------------------

    def _save_all(self) -> None:
        found: list[tuple[tuple[int, int, int], int, Save]] = []
        for index, value in enumerate(self.old.values):
            for save in value.saves:
                for part, moved in self._moved(index, self._labelled(save)):
                    new = self.writing.copies.get((index, part, save.op), -1)
                    if new < 0:
                        new = self.writing.value(index, part)
                    found.append(((save.pass_index, moved.op, save.ordinal), new, moved))
        ordinals: dict[int, int] = {}
        for _, new, save in sorted(found, key=lambda item: item[0]):
            ordinal = ordinals.get(save.pass_index, 0)
            ordinals[save.pass_index] = ordinal + 1
            self.saves.setdefault(new, []).append(replace(save, ordinal=ordinal))
            storage = self.writing.values[new].storage
            self.drops[storage] = max(self.drops.get(storage, 0), save.dropped)

    def _labelled(self, save: Save) -> Save:
        """Modules that are taken apart are not called themselves."""
        stretch = self.stretch_of.get(save.op)
        if stretch is None or save.module not in stretch.apart:
            return save
        return replace(save, module=stretch.parent)

    def _moved(self, index: int, save: Save) -> Iterator[tuple[int, Save]]:
        stretch = self.stretch_of.get(save.op)
        if stretch is None:
            yield WHOLE, self._timed(save, WHOLE)
        elif save.op not in stretch.norms:
            for part in stretch.parts:
                yield part, self._shaped(index, self._timed(save, part), stretch, part)
        elif save.as_input and index in (self._normalised(stretch, save), *self._weights(save)):
            for part in stretch.parts:
                timed = self._normed(save, stretch, part)
                yield part, self._shaped(index, timed, stretch, part)

    def _normalised(self, stretch: Stretch, save: Save) -> int:
        """What the batch norm of ``save`` normalises."""
        return self.old.ops[save.op].reads[0]

    def _weights(self, save: Save) -> Iterator[int]:
        reads = self.old.ops[save.op].reads
        return (value for value in reads[1:2] if self.writing.is_parameter(value))

    def _timed(self, save: Save, part: int) -> Save:
        places = self.writing.places
        op = places.get((save.op, part), places.get((save.op, WHOLE), 0))
        before, after = self.writing.before, self.writing.after
        return replace(
            save,
            op=op,
            packed=op + save.packed - save.op,
            reads=tuple(before(boundary, part) for boundary in save.reads),
            dropped=after(save.dropped, part),
        )

    def _normed(self, save: Save, stretch: Stretch, part: int) -> Save:
        """A batch norm reads its input twice: for its sums, then for the gradient of its input."""
        places = self.writing.places
        op = places[save.op, part]
        (back,) = (
            at
            for at in stretch.backward
            if self.old.ops[at].forward_op == save.op and at not in stretch.sums
        )
        sums = places[back, -2 - part]
        last = places.get((back, part), sums)
        reads = tuple(dict.fromkeys((sums, last)))
        return replace(
            save, op=op, packed=op + 1, reads=reads, dropped=last + 1, module=stretch.parent
        )

    def _shaped(self, index: int, save: Save, stretch: Stretch, part: int) -> Save:
        value = self.old.values[index]
        if self.old.storages[value.storage].persistent or value.storage in stretch.full:
            return save
        dim = batch_dim(self.writing.ops[save.op], save)
        if not save.shape or save.shape[dim] % stretch.samples:
            raise PlanMismatchError(
                f"section {stretch.name!r} cannot be applied: "
                f"{self.writing.ops[save.op].name} saves a tensor of shape {save.shape}, "
                "of which no dimension is known to be the batch"
            )
        rows = save.shape[dim] // stretch.samples
        start = stretch.start(part) * rows * save.stride[dim]
        cut = _narrowed(save, dim, rows * stretch.samples, rows * stretch.size(part))
        if index == stretch.given:
            if not stretch.copies:
                # A view of what is there for all.
                return replace(save, shape=cut.shape, offset=save.offset + start)
            return replace(cut, offset=0)
        if value.storage in stretch.drawn:
            # Drawn before, whatever drew it without sections.
            offset = save.offset + start
            return replace(cut, as_input=True, offset=offset, stride=save.stride)
        return cut

    # -- storages ----------------------------------------------------------------------------

    def _storage(self, index: int, draft: Draft) -> Storage:
        end = len(self.writing.ops)
        home = None
        if draft.origin >= 0:
            old = self.old.storages[draft.origin]
            home = old.home if draft.kind is old.kind else None
        released, death = self._life(index, draft)
        released = max(draft.birth, min(released, end))
        return Storage(
            draft.device,
            draft.nbytes,
            draft.kind,
            draft.birth,
            released,
            max(released, min(death, end)),
            home,
        )

    def _life(self, index: int, draft: Draft) -> tuple[int, int]:
        drop, after = self.drops.get(index, 0), self.writing.after
        if draft.released >= 0:
            return draft.released, max(draft.released, drop)
        old, part = self.old.storages[draft.origin], draft.part
        released, death = after(old.released, part), after(old.death, part)
        if old.death > max(old.released, self._last_drop(draft)):
            # Not autograd alone holds it to the end.
            return released, max(death, drop)
        if old.released == old.death and not drop:
            return death, death
        return released, max(released, drop)

    def _last_drop(self, draft: Draft) -> int:
        return self.old.last_drops.get(draft.origin, 0)


def _narrowed(save: Save, dim: int, rows: int, left: int) -> Save:
    """A save of fewer rows, in a storage that has no more than these."""
    own = save.stride[dim]

    def moved(distance: int) -> int:
        """The same distance where what lies between has fewer rows."""
        whole, rest = divmod(distance, own * rows) if own else (0, distance)
        return whole * own * left + rest

    shape, stride = list(save.shape), tuple(map(moved, save.stride))
    shape[dim] = left
    return replace(save, shape=tuple(shape), stride=stride, offset=moved(save.offset))
