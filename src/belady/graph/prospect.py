"""Whether the iterations of a kind are issued or launched, and what is known of that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

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


# A plan that has run, and what was measured under it.
Run = tuple[Trial, Measured]


class Way(Enum):
    """How iterations under a plan run: op by op, as they were captured, or that is to be seen."""

    ISSUED = auto()
    TRIED = auto()
    LAUNCHED = auto()


@dataclass
class Prospect:
    """What becomes of launching the iterations of a kind.

    Attributes
    ----------
    way, why
        How they run under the plan in force; and why they are issued, where they might be launched.
    instead
        What follows a plan for launches that is not faster than what has run before it.
    asked
        Whether a plan for launches has been asked for.
    wanted, waited
        Iterations in a row after which it is captured; and those that were issued since it could
        be launched.
    between_bytes, unlent_bytes
        What the device has to have room for while nothing is launched; and where nothing is lent.
    stepping_bytes
        What an optimizer's step takes.
    lends
        Whether a step is lent that of what launches leave idle.
    lacking_bytes
        What the first capture lacked, None while none did.
    events, stepping
        Blocks that came and went in an iteration of it, and in a step after it, in order; empty
        where that is not known.
    holes
        What the pool of the last capture that had room begins with.
    packs, packing
        Whether the blocks of what is captured are packed, and how: None where they are not known.
    tight
        Whether the plan in force has room for packed blocks only, so that it is rehearsed whenever
        it is not launched.
    rehearsed
        Whether the kernels of the plan have run.
    scarce, flaws
        Points of rehearsals of the plan at which there was no room, and how many had such points.
    lies
        Where inputs that do not last have lain in all iterations that might be launched, by place;
        0 where that was not always the same, None before the first.
    counted_bytes
        Copies of inputs that the plan in force leaves room for.
    crowded, crowded_bytes
        How often there was no room for blocks that were packed, be it for a copy of inputs beside
        them, and what was lacking in all: it is left of every budget.
    """

    way: Way = Way.ISSUED
    why: str = ""
    instead: tuple[Drawn, Trial, Run] | None = None
    asked: bool = False
    wanted: int = 1
    waited: int = 0
    between_bytes: int = 0
    unlent_bytes: int = 0
    stepping_bytes: int = 0
    lends: bool = False
    lacking_bytes: int | None = None
    events: Sequence[Event] = ()
    stepping: Sequence[Event] = ()
    holes: Holes | None = None
    packs: bool = False
    packing: Packing | None = None
    tight: bool = False
    rehearsed: bool = False
    scarce: set[int] = field(default_factory=set)
    flaws: int = 0
    lies: dict[int, int] | None = None
    counted_bytes: int = 0
    crowded: int = 0
    crowded_bytes: int = 0

    @property
    def beside_bytes(self) -> int:
        """What a plan for launches leaves of its budget."""
        lacking = self.crowded_bytes + (self.lacking_bytes or 0)
        return self.counted_bytes + self.between_bytes + lacking

    @property
    def open(self) -> bool:
        """Whether another plan, or another way, may follow the next iteration."""
        ended = self.way is Way.ISSUED and self.instead is None
        return not ended and self.way is not Way.LAUNCHED

    def may_follow(self, row: int) -> bool:
        """Whether it is captured after so many iterations of its kind in a row.

        Where its blocks are packed, as soon as these are known: it is not issued meanwhile.
        """
        return self.packing is not None if self.packs else row >= self.wanted

    @property
    def known(self) -> bool:
        """Whether it is known which blocks come and go."""
        return self.packing is not None if self.packs else bool(self.events)

    def begin(self) -> None:
        """Another plan is in force."""
        self.forget()
        self.tight = False

    def forget(self) -> None:
        """Nothing is known of what an iteration takes."""
        self.events, self.packing, self.rehearsed = (), None, False
        self.scarce, self.flaws = set(), 0

    def unpack(self) -> None:
        """Have a plan be asked for whose blocks are placed as the allocator would."""
        self.forget()
        self.packs, self.lacking_bytes, self.holes = False, 1, None
        self.crowded_bytes = 0

    def failed(self, lacking: int, copied_bytes: int) -> None:
        """A capture came to nothing, which lacked so many bytes: have another plan be asked for.

        Parameters
        ----------
        copied_bytes
            Of its copies of inputs: of what lies still no longer no plan has left room for one.
        """
        more = max(0, copied_bytes - self.counted_bytes)
        if self.packs and (more or lacking) and self.crowded < _CROWDED:
            self.crowded += 1
            self.crowded_bytes += max(0, lacking - more)
            self.forget()
            self.lacks(1)
        elif self.packs:
            self.unpack()
        elif lacking:
            self.lacks(lacking)

    def lacks(self, nbytes: int) -> None:
        """Have a plan be asked for with so much more room, once: after the first capture."""
        if self.lacking_bytes is None:
            self.lacking_bytes = nbytes

    def chances(self) -> Iterator[None]:
        """Once more where a capture lacked room; unpacked, where no plan leaves what it did."""
        lacked, tight = bool(self.lacking_bytes), self.tight
        if lacked:
            yield
        if lacked and tight and self.packs:
            self.unpack()
            yield

    def lend_no_more(self) -> None:
        """Have another plan be asked for, which leaves a step what it takes."""
        self.lends, self.between_bytes, self.why = False, self.unlent_bytes, NO_ROOM
        self.lacking_bytes = self.lacking_bytes or 1

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
