"""What computation took from one boundary of an iteration to the next."""

from __future__ import annotations

from belady.memory.lanes import Lanes

_WAIT = -1


class Pace:
    """Ticks of compute where the engine got control, and where it waited, in order of issue.

    One event each, and no more: the device is not waited for, see `belady.memory.tape.Tape`.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._ticks: list[tuple[int, object, object]] = []

    def anchor(self, boundary: int) -> None:
        """The engine got control at ``boundary``."""
        tick = self._lanes.tick()
        self._ticks.append((boundary, tick, tick))

    def waited(self, ends: tuple[object, object]) -> None:
        """Compute was told to wait between two ticks."""
        self._ticks.append((_WAIT, *ends))

    def hold(self, seconds: float) -> None:
        """Make compute wait for so long, while the host goes on."""
        begun = self._lanes.tick()
        self._lanes.hold(seconds)
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
