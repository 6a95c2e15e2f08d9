"""One operator executed, and how it could run otherwise. For indices see `belady.ir.trace`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# In `Op.batch_dims`: the batch is in the first dimension, and so is something else.
FOLDED = -1
# It grows with the batch, but no dimension has a row a sample, in their order, that the op leaves
# apart.
SPREAD = -2


class Phase(StrEnum):
    """Part of the iteration that issues an op; LOSS is forward work outside every root."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Mode(StrEnum):
    """How an op came to run."""

    NORMAL = "normal"
    REPLAY = "replay"
    COMPILED = "compiled"


class Fusion(StrEnum):
    """With which of its neighbours a compiler surely makes one kernel of an op."""

    NONE = "none"
    AFTER = "after"
    AROUND = "around"


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to run an op: its kernel time and the scratch bytes it takes meanwhile."""

    name: str
    device_seconds: float
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class Replay:
    """Another run for an op: the bits that it wrote, or some of them, from bits that are there.

    Attributes
    ----------
    device_seconds
        Kernel time, in seconds.
    reads, writes
        Ids of values; what is written is among what the op writes.
    """

    device_seconds: float
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Op:
    """One operator executed.

    Attributes
    ----------
    device_seconds
        Kernel time without launch gaps, in seconds.
    host_seconds
        Time that the host spends issuing it, in seconds.
    workspace_bytes
        Scratch bytes taken while it runs, beyond its outputs.
    reads, writes
        Ids of values.
    batch_dims
        For each of ``reads`` the dimension that carries the batch, or, in a trace made to show
        these, the tokens; `FOLDED` where this is the first, with several rows a sample (tokens),
        `SPREAD` where more is in it than one dimension shows; None where nothing of the batch is
        in it. Where a value is read in several ways, for each operand. Empty where it is not known.
    forward_op
        For a backward op, the index of the forward op that it differentiates.
    algorithms
        Ways in which it can run, the one observed among them, fastest first; empty where no other
        is known (all but convolutions).
    replayable
        Whether running it again on the same inputs, or its shortcut, gives the same bits and
        touches nothing else.
    shortcut
        What is run again instead, where there is something: of a norm whose statistics are saved,
        which is cheaper, and of a dropout whose mask is.
    fusion
        With which neighbours it is one kernel, where a compiler makes them: what one of these
        hands another, and nobody else reads, is written nowhere.
    """

    name: str
    module: str
    phase: Phase
    pass_index: int
    mode: Mode
    device_seconds: float
    host_seconds: float
    workspace_bytes: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    random: bool = False
    mutates: bool = False
    communicates: bool = False
    batch_dims: tuple[int | None, ...] = ()
    forward_op: int | None = None
    algorithms: tuple[Algorithm, ...] = ()
    replayable: bool = False
    shortcut: Replay | None = None
    fusion: Fusion = Fusion.NONE

    @property
    def replay(self) -> Replay:
        """What runs when it is replayed."""
        return self.shortcut or Replay(self.device_seconds, self.reads, self.writes)
