"""Optimizers' steps: what they take for a moment, and whose memory that is."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from belady.graph.capturing import Attempt
from belady.graph.launched import Launched
from belady.graph.optimizers import Following, Ours
from belady.graph.prospect import Stepping
from belady.measure.monitor import Monitor
from belady.memory.apart import capturing
from belady.memory.ledger import Ledger
from belady.simulate.stretch import Event

_optim = torch.optim
_KNOWN = frozenset(
    {_optim.SGD, _optim.Adam, _optim.AdamW, _optim.NAdam, _optim.RAdam, _optim.Adamax}
    | {_optim.RMSprop, _optim.Adagrad, _optim.Adadelta, _optim.ASGD, _optim.Rprop}
)
# What blocks may have more than was asked for: each, and those of which torch splits nothing off.
_ROUNDED, _UNSPLIT = 512, 1.1


class Loans:
    """Lends a step what launches leave idle, and has what it takes noted before.

    A step that keeps something of that has its launches given back before they write over it: see
    `over`. So does one that an error has ended, whose thread goes on with the loan until then.

    Parameters
    ----------
    ledger
        Where it listens when a step begins, it does so for the step alone meanwhile.
    give_up
        Has launches given back: where they lend, a step that is lent nothing has no other memory.

    Attributes
    ----------
    possible
        Whether no step so far was one to which nothing can be lent.
    before, during
        Blocks up to the first step, and of all steps, while the ledger listened last.
    """

    def __init__(self, ledger: Ledger, give_up: Callable[[], None]) -> None:
        self._ledger, self._give_up = ledger, give_up
        self._launched: Launched | None = None
        self._give_back: Callable[[], bool] | None = None
        self._clean = self.possible = True
        self._noted = False
        self.before: Sequence[Event] = ()
        self.during: Sequence[Event] = ()

    def lend_of(self, launched: Launched | None) -> None:
        """Lend what these launches leave idle from now on; None: nothing any more."""
        self.over()
        self._launched, self._clean = launched, True

    def step_begins(self, *, known: bool, settled: bool) -> None:
        """A step begins.

        Parameters
        ----------
        known
            Whether nothing else runs in it, and it keeps nothing but state, see `is_known`.
        settled
            Whether it has its state.
        """
        self.over()
        self.possible = self.possible and known
        self._noted = settled and self._ledger.listens
        if self._noted:
            self.before = self.before or self._ledger.end()
            self._ledger.begin()
        launched = self._launched
        if launched is not None and known and settled and launched.idle:
            self._give_back = launched.launches.lend()
        elif launched is not None:
            # One that comes while a backward is owed will again.
            self.possible = self.possible and launched.idle
            self._give_up()

    def step_ended(self) -> None:
        """It ended."""
        self.over()
        noted, self._noted = self._noted, False
        if noted and self._ledger.listens:
            self.during = [*self.during, *self._ledger.end()]
            self._ledger.begin()

    def over(self) -> bool:
        """Take back what is lent; whether nothing is left of all that was lent so far."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            self._clean = give_back() and self._clean
        return self._clean

    def forget(self) -> None:
        """What was noted is of no more use."""
        self.before = self.during = ()


def may_lend(launched: Launched, attempt: Attempt, step: Stepping) -> bool:
    """Whether what launches leave idle has room for what a step takes.

    Not where nobody knows that, as where a larger one has been seen than was noted.
    """
    launches, events = launched.launches, step.events
    living, held, most = dict[int, int](), 0, 0
    for block, nbytes in events:
        held += nbytes - living.get(block, 0)
        living[block], most = nbytes, max(most, held)
    known = events and _UNSPLIT * most + _ROUNDED * len(events) >= step.nbytes
    return (
        bool(known)
        and launches.has_room_for(events)
        and launches.reserved_bytes <= attempt.room_bytes
    )


class Steps:
    """Follows the steps of optimizers that have parameters of some models.

    Parameters
    ----------
    modules
        The models; the list may grow.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], monitor: Monitor, loans: Loans) -> None:
        self._ours, self._monitor, self._loans = Ours(modules), monitor, loans
        # One without momentum has no state, ever.
        self._stepped = weakref.WeakSet[torch.optim.Optimizer]()
        self._following = Following(self, begins="begins", ended="ended")

    def begins(self, optimizer: torch.optim.Optimizer, *args: Any, **named: Any) -> None:
        """A step begins, with these arguments."""
        if self._follows(optimizer):
            self._monitor.step_begins()
            # What a step calls back may run the models.
            alone = not any(it is not None for it in (*args, *named.values()))
            known = alone and is_known(optimizer)
            settled = optimizer in self._stepped or bool(optimizer.state)
            self._loans.step_begins(known=known, settled=settled)

    def ended(self, optimizer: torch.optim.Optimizer, *_: Any, **_named: Any) -> None:
        """It ended."""
        if self._follows(optimizer):
            self._loans.step_ended()
            self._monitor.step_ended()
            self._stepped.add(optimizer)

    def _follows(self, optimizer: torch.optim.Optimizer) -> bool:
        # One that is captured takes from a pool of its own, and nothing may wait for the device.
        return optimizer in self._ours and not capturing()

    def close(self) -> None:
        """Follow them no more."""
        self._following.close()


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step keeps nothing but its state, and issues all to the current stream.

    Products of matrices keep a workspace of cuBLAS's on each stream.
    """
    return type(optimizer) in _KNOWN
