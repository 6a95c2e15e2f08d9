"""Whether the iterations of a kind are issued or launched, and what is known of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from belady.graph.parts import Drawn
from belady.ir.timeline import Measured
from belady.measure.trial import Trial
from belady.simulate.holes import Holes
from belady.simulate.packing import Packing
from belady.simulate.stretch import Event

# How often blocks are packed that had no room. Of a plan with more room others are packed, and
# nobody foretells what is lost between them.
_CROWDED = 3


# Why iterations that might be launched are issued, as users are told.
NO_ROOM = "there was no room for a capture within the budget"
RAN_OUT = "the device ran out of memory while they were launched"
UNHEARD = "torch's allocator could not be listened to, as somebody else may do"
NO_FASTER = "no plan that leaves room for it is foretold to be faster"
OTHERS = (
    "too often something came between two of them: other iterations, a call without gradients, "
    "settings of torch's that change, or gradients that are kept"
)


class Ran(NamedTuple):
    """A plan that has run, and what was measured under it."""

    trial: Trial
    measured: Measured


class Way(Enum):
    """How iterations under a plan run: op by op, as they were captured, or that is to be seen."""

    ISSUED = auto()
    TRIED = auto()
    LAUNCHED = auto()


class Again(Enum):
    """Whether another plan for launches is asked for: where a capture comes to nothing, once."""

    OPEN = auto()
    WANTED = auto()
    OVER = auto()


@dataclass
class Stepping:
    """What is known of optimizers' steps.

    Attributes
    ----------
    nbytes
        What one takes.
    events
        Blocks that come and go in it, in order; empty where that is not known.
    lent
        Whether it is lent that of what launches leave idle.
    """

    nbytes: int = 0
    events: Sequence[Event] = ()
    lent: bool = False


@dataclass
class Heard:
    """What is known of the blocks of iterations under the plan in force.

    Attributes
    ----------
    events
        Those that came and went in one, in order; empty where that is not known.
    packing
        How they are packed; None where they are not, or are not known.
    rehearsed
        Whether the kernels of the plan have run.
    scarce, flaws
        Points of rehearsals at which there was no room, and how many had such points.
    """

    events: Sequence[Event] = ()
    packing: Packing | None = None
    rehearsed: bool = False
    scarce: set[int] = field(default_factory=set)
    flaws: int = 0


@dataclass
class Beside:
    """Bytes that a plan for launches leaves of its budget, by what for.

    Attributes
    ----------
    between
        What is needed while nothing is launched.
    unlent
        The same where nothing is lent to an optimizer's step.
    copies
        Copies of inputs that the plan in force leaves room for.
    lacking
        What the last capture lacked, for the next plan alone.
    crowded
        What was lacking for packed blocks in all, be it for a copy of inputs beside them.
    """

    between: int = 0
    unlent: int = 0
    copies: int = 0
    lacking: int = 0
    crowded: int = 0

    @property
    def nbytes(self) -> int:
        """All of them."""
        return self.copies + self.between + self.lacking + self.crowded


@dataclass
class Prospect:
    """What becomes of launching the iterations of a kind.

    Attributes
    ----------
    way, why
        How they run under the plan in force; and why they are issued, where they might be launched.
    instead
        What follows a plan for launches that is not faster than what has run before it.
    asked, again
        Whether a plan for launches has been asked for, and whether another one is.
    wanted, waited
        Iterations in a row after which it is captured; and those that were issued since it could
        be launched.
    packs
        Whether the blocks of what is captured are packed.
    tight
        Whether the plan in force has room for packed blocks only, so that it is rehearsed whenever
        it is not launched.
    crowdings
        How often there was no room for blocks that were packed.
    holes
        What the pool of the last capture that had room begins with.
    lies
        Where inputs that do not last have lain in all iterations that might be launched, by place;
        0 where that was not always the same, None before the first.
    """

    way: Way = Way.ISSUED
    why: str = ""
    instead: tuple[Drawn, Trial, Ran] | None = None
    asked: bool = False
    again: Again = Again.OPEN
    wanted: int = 1
    waited: int = 0
    packs: bool = False
    tight: bool = False
    crowdings: int = 0
    holes: Holes | None = None
    lies: dict[int, int] | None = None
    heard: Heard = field(default_factory=Heard)
    beside: Beside = field(default_factory=Beside)
    step: Stepping = field(default_factory=Stepping)

    @property
    def open(self) -> bool:
        """Whether another plan, or another way, may follow the next iteration."""
        ended = self.way is Way.ISSUED and self.instead is None
        return not ended and self.way is not Way.LAUNCHED

    def may_follow(self, row: int) -> bool:
        """Whether it is captured after so many iterations of its kind in a row.

        Where its blocks are packed, as soon as these are known: it is not issued meanwhile.
        """
        return self.heard.packing is not None if self.packs else row >= self.wanted

    @property
    def known(self) -> bool:
        """Whether it is known which blocks come and go."""
        return self.heard.packing is not None if self.packs else bool(self.heard.events)

    def begin(self) -> None:
        """Another plan is in force."""
        self.heard, self.tight = Heard(), False

    def unpack(self) -> None:
        """Have a plan be asked for whose blocks are placed as the allocator would."""
        self.heard, self.packs, self.holes = Heard(), False, None
        self.beside.lacking = self.beside.crowded = 0
        self.again = Again.WANTED

    def failed(self, lacking: int, copied_bytes: int) -> None:
        """A capture came to nothing, which lacked so many bytes: have another plan be asked for.

        Parameters
        ----------
        copied_bytes
            Of its copies of inputs: of what lies still no longer no plan has left room for one.
        """
        more = max(0, copied_bytes - self.beside.copies)
        if self.packs and (more or lacking) and self.crowdings < _CROWDED:
            self.crowdings += 1
            self.beside.crowded += max(0, lacking - more)
            self.heard = Heard()
            self._lacks(0)
        elif self.packs:
            self.unpack()
        elif lacking:
            self._lacks(lacking)

    def _lacks(self, nbytes: int) -> None:
        if self.again is Again.OPEN:
            self.again, self.beside.lacking = Again.WANTED, nbytes

    def lend_no_more(self) -> None:
        """Have another plan be asked for, which leaves a step what it takes."""
        self.step.lent, self.beside.between, self.why = False, self.beside.unlent, NO_ROOM
        self.again = Again.WANTED

    def answered(self, *, tight: bool) -> None:
        """Another plan has been asked for: once more, if blocks were to be packed before."""
        self.again, self.beside.lacking = Again.OPEN if tight else Again.OVER, 0

    def issue(self, why: str) -> None:
        """Iterations are issued from now on."""
        self.way, self.why = Way.ISSUED, why

    def put_off(self, most: int) -> None:
        """Wait for twice as long until it is captured again; for more than ``most``, for good."""
        self.wanted *= 2
        if self.wanted > most:
            self.issue(OTHERS)


def shows_more(chosen: Trial | None, measured: Measured | None) -> bool:
    """Whether a plan that is to be measured shows kernels and links that flushes have held up."""
    flushed = measured is not None and measured.allocation_retries > 0
    return flushed and chosen is not None and chosen.measured is None
