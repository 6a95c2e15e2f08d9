"""What one steady iteration does.

Indices. Ops are numbered in issue order. A *boundary* ``b`` is the moment just before op ``b``
is issued; boundary ``len(ops)`` is the end of the iteration. Bytes of a storage are held for
every op ``i`` with ``birth <= i < death``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from belady.ir.ops import Algorithm, Mode, Op, Phase, Replay

__all__ = [
    "PERSISTENT",
    "Algorithm",
    "Mode",
    "Need",
    "Op",
    "Phase",
    "Replay",
    "Save",
    "Source",
    "Storage",
    "StorageKind",
    "Tier",
    "Trace",
    "Use",
    "Value",
]


class Tier(StrEnum):
    """Where bytes live."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Need(StrEnum):
    """What a use needs of a value; SIGN is whether it is positive, if it is not negative."""

    VALUES = "values"
    SIGN = "sign"
    SHAPE = "shape"


class StorageKind(StrEnum):
    """Role of a storage; the first four are persistent."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    STATE = "state"
    INPUT = "input"
    ACTIVATION = "activation"
    OTHER = "other"


class Source(StrEnum):
    """Where a trace comes from."""

    STATIC = "static"
    EAGER = "eager"
    GRAPH = "graph"


PERSISTENT = frozenset(
    {StorageKind.PARAMETER, StorageKind.BUFFER, StorageKind.GRADIENT, StorageKind.STATE}
)


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes on a device.

    Attributes
    ----------
    nbytes
        Bytes asked for; the allocator's rounding is in the HardwareProfile.
    birth, death
        Boundaries between which the bytes are held when every value is kept.
    released
        Boundary at which nothing but autograd's saved values holds the storage any more, if
        that comes before ``death``; otherwise equal to ``death``.
    home
        Tier of a persistent storage between its uses; None for a transient one.
    """

    device: str
    nbytes: int
    kind: StorageKind
    birth: int
    released: int
    death: int
    home: Tier | None = None

    @property
    def persistent(self) -> bool:
        """Whether the bytes outlive the iteration (parameter, buffer, gradient, state)."""
        return self.kind in PERSISTENT


@dataclass(frozen=True, slots=True)
class Use:
    """One read of a value by an op."""

    op: int
    need: Need = Need.VALUES


@dataclass(frozen=True, slots=True)
class Save:
    """One time that autograd saves a value.

    Attributes
    ----------
    pass_index, ordinal
        The ``ordinal``-th save of that pass: the name of this save across iterations.
    op
        Index of the forward op whose backward needs the value.
    packed
        Boundary at which it is saved.
    reads
        Boundaries at which backward takes it back; empty when backward never asks.
    dropped
        Boundary at which autograd lets go of it.
    as_input
        Whether the saving op reads the value (False: it produced it).
    shape, stride, offset, dtype
        Geometry of the view that is saved, in elements; dtype as torch names it.
    """

    pass_index: int
    ordinal: int
    op: int
    packed: int
    reads: tuple[int, ...]
    dropped: int
    as_input: bool
    module: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Value:
    """Content of a storage at one version.

    ``producer`` is the op that wrote it, or -1 when it was there before the iteration.
    """

    storage: int
    version: int
    producer: int
    uses: tuple[Use, ...] = ()
    saves: tuple[Save, ...] = ()

    @property
    def first_save(self) -> int:
        """Boundary of the first save."""
        saves = self.saves
        # Nearly all are saved once, and planners ask a hundred times for each.
        return saves[0].packed if len(saves) == 1 else min(save.packed for save in saves)

    @property
    def first_read(self) -> int | None:
        """Boundary at which backward first takes the value back, or None."""
        saves = self.saves
        if len(saves) == 1:
            reads = saves[0].reads
            return reads[0] if len(reads) == 1 else min(reads, default=None)
        return min((read for save in saves for read in save.reads), default=None)

    @property
    def dropped(self) -> int:
        """Boundary at which the last save is let go."""
        saves = self.saves
        return saves[0].dropped if len(saves) == 1 else max(save.dropped for save in saves)


@dataclass(frozen=True)
class Trace:
    """One steady iteration: ops in issue order, and the storages and values they touch.

    Attributes
    ----------
    device
        Type of the compute device, ``"cuda"`` or ``"cpu"``.
    roots
        Class name of the root of each pass, in order.
    anchors
        Boundaries at which an eager engine gets control (saves, and the first read of each),
        ascending; empty means every boundary (graph engine).
    versions
        Names and versions of the software that made it, e.g. ``("torch", "2.11.0")``.
    """

    source: Source
    device: str
    roots: tuple[str, ...]
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    values: tuple[Value, ...]
    anchors: tuple[int, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    version: int = field(default=1, metadata={"const": 1})

    @cached_property
    def saved(self) -> tuple[int, ...]:
        """Ids of the values that autograd saves and that are not persistent."""
        return tuple(
            index
            for index, value in enumerate(self.values)
            if value.saves and not self.storages[value.storage].persistent
        )

    @cached_property
    def followed(self) -> bool:
        """Whether an iteration that goes otherwise than this one is noticed in its forward.

        That is so in a graph, and in an eager engine where it tries what may run again.
        """
        return any(op.replayable for op in self.ops)

    @cached_property
    def replays(self) -> tuple[Replay, ...]:
        """What runs when each op is replayed."""
        return tuple(op.replay for op in self.ops)

    @cached_property
    def is_host_bound(self) -> bool:
        """Whether the device waits for the host to issue ops, rather than the other way round."""
        # On a CPU the host issues and computes: its time is all that there is.
        issued = sum(op.host_seconds for op in self.ops)
        return self.device != "cpu" and issued > sum(op.device_seconds for op in self.ops)

    @cached_property
    def worked_out(self) -> dict[Hashable, Any]:
        """What follows from the trace and little else: planners ask for it a thousand times."""
        return {}

    @cached_property
    def last_drops(self) -> dict[int, int]:
        """Boundary at which autograd lets go of the last saved value of each storage."""
        last: dict[int, int] = {}
        for value in self.values:
            if value.saves:
                last[value.storage] = max(last.get(value.storage, 0), value.dropped)
        return last

    @cached_property
    def contents(self) -> dict[int, list[int]]:
        """Ids of the values of each storage, in the order in which they are written."""
        found: dict[int, list[int]] = {}
        for index in sorted(range(len(self.values)), key=lambda i: self.values[i].producer):
            found.setdefault(self.values[index].storage, []).append(index)
        return found

    @cached_property
    def fingerprint(self) -> str:
        """Name of the structure (not seconds, workspaces, what may be replayed), 16 hex digits."""
        # An enum makes its repr anew each time it is asked.
        phases = {phase: repr(phase) for phase in Phase}
        kinds = {kind: repr(kind) for kind in StorageKind}
        parts = [f"({op.name!r}, {phases[op.phase]}, {op.reads}, {op.writes})" for op in self.ops]
        parts += [f"({it.device!r}, {it.nbytes}, {kinds[it.kind]})" for it in self.storages]
        parts += [f"({it.storage}, {it.version}, {it.producer}){it.saves}" for it in self.values]
        return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]

    def locate(self, op: int) -> str:
        """Name op ``op`` for a message."""
        it = self.ops[op]
        return f"op {op} {it.name} in module {it.module!r} ({it.phase.value})"
