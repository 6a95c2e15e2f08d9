"""Writes a trace anew, with the ops of its stretches once for every slice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from belady.ir.ops import Algorithm, Mode, Op, Replay
from belady.ir.trace import StorageKind, Trace, Use

# Not in a slice.
WHOLE = -1


@dataclass
class Draft:
    """A storage of the new trace.

    Attributes
    ----------
    origin, part
        The storage of the old trace that it stands for, and the slice; -1 where there is none.
    released
        Boundary of the new trace, where it is known already.
    """

    nbytes: int
    device: str
    kind: StorageKind
    birth: int
    origin: int = -1
    part: int = WHOLE
    released: int = -1


@dataclass
class Written:
    """A value of the new trace; ``origin`` and ``part`` as for a storage."""

    storage: int
    version: int
    producer: int
    origin: int = -1
    part: int = WHOLE
    uses: list[Use] = field(default_factory=list)


def _share(way: Algorithm, size: int, samples: int) -> Algorithm:
    return replace(
        way,
        device_seconds=way.device_seconds * size / samples,
        workspace_bytes=-(-way.workspace_bytes * size // samples),
    )


class Rewriting:
    """The new trace as far as it is written: ops in order, and where those of the old one went.

    Attributes
    ----------
    places
        New index of an op, by old index and slice.
    blocks
        Old ops of each forward and backward of a stretch, and the new boundary where it ends.
    inside
        All of these ops.
    copies
        What ops of a later stage read and save instead: by old value, slice and old op.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.ops: list[Op] = []
        self.storages: list[Draft] = []
        self.values: list[Written] = []
        self.places: dict[tuple[int, int], int] = {}
        self.blocks: list[tuple[Sequence[int], int]] = []
        self.inside: set[int] = set()
        self.copies: dict[tuple[int, int, int], int] = {}
        self._storages: dict[tuple[int, int], int] = {}
        self._values: dict[tuple[int, int], int] = {}
        self._versions: dict[int, int] = {}
        self._needs = {
            (index, use.op): use.need
            for index, value in enumerate(trace.values)
            for use in value.uses
        }
        for index, value in enumerate(trace.values):
            if value.producer < 0:
                self._write(index, WHOLE, -1, 1, 1)
        valued = {value.storage for value in trace.values}
        for index in range(len(trace.storages)):
            if index not in valued:
                self._storage(index, WHOLE, trace.storages[index].birth, 1, 1)

    # -- ops ---------------------------------------------------------------------------------

    def copy(self, at: int) -> None:
        """Issue op ``at`` as it is."""
        self.issue(at, WHOLE, 1, 1)

    def issue(self, at: int, part: int, size: int, samples: int, full: Iterable[int] = ()) -> int:
        """Issue op ``at`` for a slice of ``size`` of ``samples`` samples.

        Parameters
        ----------
        full
            Storages that every slice makes in full size.
        """
        old = self.trace.ops[at]
        reads = tuple(dict.fromkeys(self.value(value, part) for value in old.reads))
        index = self.places[at, part] = len(self.ops)
        for value in old.reads:
            self.values[self.value(value, part)].uses.append(Use(index, self._needs[value, at]))
        origin = old.forward_op
        if origin is not None:
            origin = self.places.get((origin, part), self.places.get((origin, WHOLE)))
        writes = []
        for value in old.writes:
            shared = self.trace.values[value].storage in full
            writes.append(self._write(value, part, index, *((1, 1) if shared else (size, samples))))
        # Not by `replace`, as this is most of what slicing takes.
        self.ops.append(
            Op(
                old.name, old.module, old.phase, old.pass_index, old.mode,
                old.device_seconds * size / samples, old.host_seconds,
                -(-old.workspace_bytes * size // samples),
                reads, tuple(dict.fromkeys(writes)),
                old.random, old.mutates, old.communicates, old.batch_dims, origin,
                tuple(_share(way, size, samples) for way in old.algorithms), old.replayable,
                None if old.shortcut is None else self._mapped(old.shortcut, part),
            )
        )  # fmt: skip
        return index

    def _mapped(self, replay: Replay, part: int) -> Replay:
        reads = tuple(self.value(value, part) for value in replay.reads)
        writes = tuple(self.value(value, part) for value in replay.writes)
        return replace(replay, reads=reads, writes=writes)

    def extra(
        self, name: str, like: Op, reads: Iterable[int] = (), *, origin: int | None = None
    ) -> int:
        """Issue an op that slicing adds: seconds and workspace are not known, so they are 0.

        Parameters
        ----------
        like
            Whose module, phase and pass it shares.
        reads
            Values of the new trace.
        """
        index = len(self.ops)
        reads = tuple(dict.fromkeys(reads))
        for value in reads:
            self.values[value].uses.append(Use(index))
        self.ops.append(
            Op(
                f"aten.{name}", like.module, like.phase, like.pass_index, Mode.NORMAL,
                0.0, 0.0, 0, reads, (), forward_op=origin,
            )
        )  # fmt: skip
        return index

    # -- values ------------------------------------------------------------------------------

    def value(self, old: int, part: int) -> int:
        """New id of a value in a slice; what the slices share has one of its own."""
        return self._values.get((old, part), self._values.get((old, WHOLE), -1))

    def name(self, old: int, part: int, new: int) -> None:
        """From here on ``new`` stands for value ``old`` in slice ``part``."""
        self._values[old, part] = new
        self._storages[self.trace.values[old].storage, part] = self.values[new].storage
        self.values[new].origin, self.values[new].part = old, part

    def born(self, draft: Draft) -> int:
        """Add a storage that the op issued last makes, and give its first value."""
        self.storages.append(draft)
        return self.rewritten(len(self.storages) - 1, created=True)

    def rewritten(self, storage: int, *, created: bool = False) -> int:
        """Give the next value of a storage, which the op issued last writes."""
        index = len(self.ops) - 1
        version = self._versions[storage] = self._versions.get(storage, -1) + 1
        self.values.append(Written(storage, version, index))
        new = len(self.values) - 1
        op = self.ops[index]
        self.ops[index] = replace(op, writes=(*op.writes, new), mutates=op.mutates or not created)
        return new

    def _write(self, old: int, part: int, index: int, size: int, samples: int) -> int:
        value = self.trace.values[old]
        known = self._storages.get((value.storage, part))
        if known is None:
            birth = max(index, 0)
            if index < 0:
                birth = self.trace.storages[value.storage].birth
            known = self._storage(value.storage, part, birth, size, samples)
        version = self._versions[known] = self._versions.get(known, -1) + 1
        self.values.append(Written(known, version, index, old, part))
        self._values[old, part] = len(self.values) - 1
        return len(self.values) - 1

    def _storage(self, old: int, part: int, birth: int, size: int, samples: int) -> int:
        storage = self.trace.storages[old]
        nbytes = storage.nbytes * size // samples
        kind = storage.kind
        if part >= 0 and kind is StorageKind.GRADIENT:
            # One slice's share of it.
            kind = StorageKind.ACTIVATION
        self.storages.append(Draft(nbytes, storage.device, kind, birth, old, part))
        self._storages[old, part] = len(self.storages) - 1
        return len(self.storages) - 1

    def is_parameter(self, old: int) -> bool:
        """Whether a value of the old trace is a parameter's."""
        storage = self.trace.storages[self.trace.values[old].storage]
        return storage.kind is StorageKind.PARAMETER

    def draft(self, value: int) -> Draft:
        """The storage of a value of the new trace."""
        return self.storages[self.values[value].storage]

    def sliced(self, old: int, part: int) -> Draft | None:
        """What stands for a slice of a storage of the old trace, if it is cut."""
        new = self._storages.get((old, part))
        return None if new is None else self.storages[new]

    # -- boundaries --------------------------------------------------------------------------

    def before(self, boundary: int, part: int = WHOLE) -> int:
        """New boundary just before the op that comes at an old one."""
        place = self.places.get((boundary, part))
        return self.after(boundary, part) if place is None else place

    def after(self, boundary: int, part: int = WHOLE) -> int:
        """New boundary just after the op that comes before an old one.

        What is outside of a stretch and goes in its middle goes with its end: its caller holds
        what goes in.
        """
        if boundary <= 0:
            return 0
        place = self.places.get((boundary - 1, part))
        if place is not None and (part >= 0 or boundary - 1 not in self.inside):
            return place + 1
        for ops, end in self.blocks:
            if ops[0] < boundary <= ops[-1] + 1:
                own = [op for op in ops if op < boundary and (op, part) in self.places]
                return self.places[own[-1], part] + 1 if own and part >= 0 else end
        return self.after(boundary) if part >= 0 else self._nearest(boundary)

    def ended(self, ops: Sequence[int]) -> None:
        """All slices of the forward or backward ``ops`` of a stretch are issued."""
        self.blocks.append((ops, len(self.ops)))
        self.inside.update(ops)

    def _nearest(self, boundary: int) -> int:
        for old in range(boundary, len(self.trace.ops)):
            place = self.places.get((old, WHOLE))
            if place is not None:
                return place
        return len(self.ops)
