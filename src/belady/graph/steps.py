"""Optimizers' steps: what they take for a moment, and whose memory that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from belady.graph.launched import Launched
from belady.graph.optimizers import Following, Ours
from belady.measure.monitor import Monitor
from belady.memory.ledger import Ledger
from belady.simulate.stretch import Event


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
        Whether every step so far could have been lent something, had there been launches.
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
        if self._launched is not None and not (known and settled):
            self._give_up()
        elif self._launched is not None and self._launched.idle:
            self._give_back = self._launched.launches.lend()

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


def may_lend(launched: Launched, events: Sequence[Event], room_bytes: int) -> bool:
    """Whether what launches leave idle has room for blocks that come and go in this order.

    Parameters
    ----------
    events
        None: nobody knows them.
    room_bytes
        The most that the device may reserve then.
    """
    launches = launched.launches
    return bool(events) and launches.has_room_for(events) and launches.reserved_bytes <= room_bytes


class Steps:
    """Follows the steps of optimizers that have parameters of some models.

    Parameters
    ----------
    modules
        The models; the list may grow.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], monitor: Monitor, loans: Loans) -> None:
        self._ours, self._monitor, self._loans = Ours(modules), monitor, loans
        self._following = Following(self, begins="begins", ended="ended")

    def begins(self, optimizer: torch.optim.Optimizer, *args: Any, **named: Any) -> None:
        """A step begins, with these arguments."""
        if optimizer in self._ours:
            self._monitor.step_begins()
            # What a step calls back may run the models.
            alone = not any(it is not None for it in (*args, *named.values()))
            known, settled = alone and is_known(optimizer), bool(optimizer.state)
            self._loans.step_begins(known=known, settled=settled)

    def ended(self, optimizer: torch.optim.Optimizer, *_: Any, **_named: Any) -> None:
        """It ended."""
        if optimizer in self._ours:
            self._loans.step_ended()
            self._monitor.step_ended()

    def close(self) -> None:
        """Follow them no more."""
        self._following.close()


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step keeps next to nothing that it takes, and issues all to the current stream.

    Those of torch do so. What those of others do nobody knows.
    """
    return type(optimizer).__module__.startswith("torch.optim.")
