"""What computation took from one boundary of an iteration to the next."""

from __future__ import annotations

from belady.memory.lanes import Lanes

_WAIT = -1
# A launch queue is taken to have room for a thousand launches, and an op to make up to three.
_OPS_AHEAD = 200


class Pace:
    """Ticks of compute where the engine got control, and where it waited, in order of issue.

    One event each, and no more: the device is not waited for, see `belady.memory.tape.Tape`.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._ticks: list[tuple[int, object, object]] = []
        # Ops before which compute is held back, and for how long.
        self._ahead, self._lead_s = range(0), 0.0

    def anchor(self, boundary: int) -> None:
        """The engine got control at ``boundary``."""
        if boundary in self._ahead[_OPS_AHEAD:]:
            self._hold(self._ahead[self._ahead.index(boundary) :])
        tick = self._lanes.tick()
        self._ticks.append((boundary, tick, tick))

    def waited(self, ends: tuple[object, object]) -> None:
        """Compute was told to wait between two ticks."""
        self._ticks.append((_WAIT, *ends))

    def hold(self, seconds: float, ops: range) -> None:
        """Make compute wait while the host, which takes so long to issue ``ops``, gets ahead.

        And again within them: where its launch queue is full the host waits for the device, and
        once that goes on it catches up with the host.
        """
        # Of twice as many ops as go ahead, as control comes back at some of them: before the last
        # few, too, since what the host does at the end can take longer than they do.
        self._lead_s = seconds * len(ops[: 2 * _OPS_AHEAD]) / max(1, len(ops))
        self._hold(ops)

    def _hold(self, ops: range) -> None:
        self._ahead = ops
        begun = self._lanes.tick()
        self._lanes.hold(self._lead_s)
        self.waited((begun, self._lanes.tick()))

    def seconds(self) -> dict[tuple[int, int], float]:
        """Seconds of the ops between two boundaries, without waits; waits for the device.

        What runs between two visits of one boundary, outside of what the engine runs, is of no op.
        """
        found: dict[tuple[int, int], float] = {}
        if not self._ticks:
            return found
        begun, _, since = self._ticks[0]
        took = 0.0
        for boundary, start, end in self._ticks[1:]:
            took += self._lanes.seconds(since, start)
            since = end
            if boundary == _WAIT:
                continue
            if boundary > begun >= 0:
                found[begun, boundary] = took
            begun, took = max(begun, boundary), 0.0
        return found
