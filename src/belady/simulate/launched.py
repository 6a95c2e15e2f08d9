"""Predict an iteration whose forward and backward are one launch each."""

from __future__ import annotations

from dataclasses import dataclass

from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Plan
from belady.ir.timeline import Cause
from belady.ir.trace import Trace
from belady.simulate.engine import Issuer
from belady.simulate.lanes import computed_at, run


def launched_seconds(trace: Trace, hardware: HardwareProfile, plan: Plan, last: int) -> float:
    """Duration that is predicted where compute waits for all copies after op ``last``.

    There the first launch ends: with all that was issued in it.
    """
    issuer = _Launched(trace, hardware, plan, last=last)
    issuer.issue()
    run(issuer.tasks)
    return computed_at(issuer.tasks)


@dataclass(slots=True)
class _Launched(Issuer):
    last: int = -1

    def _work(self, index: int, host_s: float, seconds: float, value: int = -1) -> None:
        Issuer._work(self, index, host_s, seconds, value)
        if index == self.last and value < 0:
            # A lane ends with the newest of its copies.
            newest = {task.lane: task for task in self.tasks if task.nbytes}
            for task in newest.values():
                self._wait(task, Cause.COPY_OUT)
