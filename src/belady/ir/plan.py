"""What to do with every value of one trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from belady.ir.trace import Tier


class Workspace(StrEnum):
    """Convolution algorithms asked for, phase-wide: untouched, least scratch, fastest."""

    UNCHANGED = "unchanged"
    MEMORY = "memory"
    PERFORMANCE = "performance"


@dataclass(frozen=True, slots=True)
class Keep:
    """Leave the value where it is."""


@dataclass(frozen=True, slots=True)
class Offload:
    """Copy the value to ``tier`` and back. All times are op indices, see `belady.ir.trace`.

    Attributes
    ----------
    copy_out_after
        The copy-out is issued after op ``copy_out_after``.
    free_at
        Device bytes are let go at this boundary: compute waits for the copy-out here.
    copy_in_at
        Device bytes are taken again and the copy-in is issued at this boundary.
    ready_by
        Compute waits for the copy-in at this boundary, the first read in backward.
    """

    tier: Tier
    copy_out_after: int
    free_at: int
    copy_in_at: int
    ready_by: int


@dataclass(frozen=True, slots=True)
class Recompute:
    """Drop the value and produce it again by replaying ops of forward; see `belady.ir.replay`.

    Attributes
    ----------
    ops
        What is replayed, ascending; the last one writes the value.
    at
        Boundary of the replay: the first read in backward, or one before it, at which another
        replay starts from the value, or runs the same ops.
    """

    ops: tuple[int, ...]
    at: int


@dataclass(frozen=True, slots=True)
class Encode:
    """Hold the value on the device in a lossless encoding of ``nbytes`` bytes until ``decode_at``.

    The encoding is made when the value is saved and undone at its first read in backward.
    """

    codec: str
    nbytes: int
    encode_at: int
    decode_at: int


@dataclass(frozen=True, slots=True)
class Managed:
    """Move the value into a block of managed memory, which leaves the device and comes back.

    All times are boundaries, see `belady.ir.trace`.

    Attributes
    ----------
    prefetch_out_at
        The value is copied into a block on the device, its own bytes are let go, and the block's
        way out is issued.
    gone_by
        The block's device bytes are gone: compute waits for its way out here.
    prefetch_in_at
        Device bytes are taken again and the block's way back is issued.
    ready_by
        Compute waits for the block's way back here, at the latest at the first read in backward.
    faults
        No way back is issued: the ops that read the block fault its pages in. Then
        ``prefetch_in_at`` is ``ready_by``.
    """

    prefetch_out_at: int
    gone_by: int
    prefetch_in_at: int
    ready_by: int
    faults: bool = False

    @property
    def moves(self) -> Offload:
        """The same moments as those of a copy to host memory."""
        return Offload(
            Tier.HOST, self.prefetch_out_at - 1, self.gone_by, self.prefetch_in_at, self.ready_by
        )


Decision = Keep | Offload | Recompute | Encode | Managed


@dataclass(frozen=True, slots=True)
class Section:
    """Run ``modules``, one after another, in ``slices`` slices along the batch or the tokens.

    Attributes
    ----------
    modules
        Paths of one module, or of consecutive children of one ``torch.nn.Sequential``.
    along
        The dimension of what goes in and what comes out that is cut: 0 for the batch, 1 for the
        tokens of each sample.
    """

    modules: tuple[str, ...]
    slices: int
    along: int = 0

    @property
    def unit(self) -> str:
        """What a slice has several of."""
        return "token" if self.along else "sample"

    @property
    def whole(self) -> str:
        """All of them."""
        return "tokens" if self.along else "batch"

    @property
    def ends(self) -> tuple[str, ...]:
        """Names of the first module and, if it is another, of the last, for people."""
        both = dict.fromkeys((self.modules[0], self.modules[-1]))
        return tuple(module or "the model" for module in both)


@dataclass(frozen=True, slots=True)
class OrderEdit:
    """Issue op ``op`` just before op ``before`` (weight gradient before data gradient)."""

    op: int
    before: int


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that each tier may hold; None means the tier's capacity."""

    device_bytes: int
    host_bytes: int | None = None
    disk_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """The decision for one value, and why it was taken."""

    value: int
    decision: Decision
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """Decisions for one trace. A value without an assignment is kept.

    Attributes
    ----------
    trace
        Fingerprint of the trace it is for; an engine refuses any other.
    planner
        Name of the planner and the version of its rules, e.g. ``"vdnn_all/1"``.
    reuse_classes
        Groups of storages that share one buffer in turn.
    numerics
        Names of the settings in this plan that can change a bit of the result.
    layer_algorithms
        ``(op, algorithm name)``: per-layer choice of convolution algorithm, honoured by the
        simulator alone (execution sets ``workspace`` phase-wide).
    predicted_peak_bytes
        Device bytes held at the peak, allocator rounding included, margin excluded.
    """

    trace: str
    planner: str
    budget: Budget
    assignments: tuple[Assignment, ...] = ()
    sections: tuple[Section, ...] = ()
    order_edits: tuple[OrderEdit, ...] = ()
    reuse_classes: tuple[tuple[int, ...], ...] = ()
    workspace: Workspace = Workspace.UNCHANGED
    layer_algorithms: tuple[tuple[int, str], ...] = ()
    numerics: tuple[str, ...] = ()
    predicted_peak_bytes: int = 0
    predicted_seconds: float = 0.0
    version: int = field(default=1, metadata={"const": 1})

    @cached_property
    def decisions(self) -> dict[int, Decision]:
        """Decision by value id; values that are kept are absent."""
        return {a.value: a.decision for a in self.assignments if not isinstance(a.decision, Keep)}

    @property
    def moves_nothing(self) -> bool:
        """Whether the iteration runs as if belady were not there."""
        return not self.decisions and not self.sections and not self.order_edits
