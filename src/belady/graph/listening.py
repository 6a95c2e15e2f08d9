"""Iterations that are listened to, so that what is captured of them has its blocks placed."""

from __future__ import annotations

import torch

from belady.graph.program import Program
from belady.graph.prospect import NO_ROOM, UNHEARD, Prospect
from belady.graph.rehearsal import Rehearsal
from belady.graph.steps import Loans
from belady.measure.probe import ram
from belady.memory.ledger import Ledger

# Part of what is free when a rehearsal begins that stays on the device of what is made in it; and
# part of what a host has free that the rest may take meanwhile.
_STAYS, _HOST = 0.25, 0.5
# Rehearsals of a plan without room somewhere, after which there is to be no other.
_FLAWS = 4


class Listening:
    """Has one iteration at a time listened to, as it is issued or rehearsed.

    Parameters
    ----------
    ledger
        Shared with those who lend to optimizers' steps.
    """

    def __init__(
        self, device: torch.device, budget_bytes: int, ledger: Ledger, loans: Loans
    ) -> None:
        self._device, self._budget_bytes = device, budget_bytes
        self._ledger, self._loans = ledger, loans
        self._rehearsal: Rehearsal | None = None

    def begin(self, prospect: Prospect) -> None:
        """Have the blocks of the iteration that begins noted, unless they are known."""
        if prospect.known:
            return
        self._loans.forget()
        if prospect.packs:
            self.rehearse(prospect)
        else:
            self._ledger.begin()

    def rehearse(self, prospect: Prospect) -> None:
        """Have the iteration that begins rehearsed, if it is not."""
        if self._rehearsal is None:
            cuda = self._device.type == "cuda"
            held = torch.cuda.memory_allocated(self._device) if cuda else 0
            most = int(_STAYS * max(0, self._budget_bytes - held))
            _, available = ram()
            host = int(_HOST * available)
            self._rehearsal = Rehearsal(
                self._device, most, host, prospect.heard.scarce, self._ledger.begin
            )

    def program(self, program: Program) -> Program:
        """What a call of the iteration runs as that is issued."""
        return program if self._rehearsal is None else self._rehearsal.program(program)

    def went(self, prospect: Prospect) -> None:
        """The iteration went as planned: note what was heard."""
        rehearsal, self._rehearsal = self._rehearsal, None
        if self._ledger.listens:
            prospect.step.events = self._loans.during
            if rehearsal is None:
                prospect.heard.events = self._loans.before or self._ledger.end()
        if rehearsal is None:
            return
        # It has heard what came and went; what came after is of no use.
        rehearsal.close()
        self._ledger.drop()
        heard = prospect.heard
        if heard.packing is not None or not prospect.packs:
            # It was for want of room alone.
            return
        heard.flaws += rehearsal.flawed
        again = not heard.rehearsed or rehearsal.flawed
        if again and heard.flaws <= _FLAWS:
            # Kernels that are loaded, and measured by those who choose among them, take more.
            heard.rehearsed = True
            return
        heard.packing = None if again else rehearsal.packing()
        if heard.packing is None:
            prospect.unpack()
            prospect.issue(NO_ROOM if again else UNHEARD)

    def drop(self) -> bool:
        """Listen no more; whether an iteration was being rehearsed."""
        self._ledger.drop()
        rehearsal, self._rehearsal = self._rehearsal, None
        if rehearsal is not None:
            rehearsal.close()
        return rehearsal is not None
