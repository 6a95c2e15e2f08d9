"""What was moved, and how long computation waited for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from belady.ir.timeline import Lane, Moved
from belady.memory.lanes import Lanes
from belady.memory.pace import Pace
from belady.memory.tape import Tape

COPYING = (Lane.COPY_OUT, Lane.COPY_IN, Lane.DISK_WRITE, Lane.DISK_READ)
_MOST_PENDING = 4096
_UNTIMED = nullcontext()


class Meter:
    """Counts bytes and copies by lane, and times stalls while ``enabled``. Thread-safe.

    Attributes
    ----------
    tape
        Takes down every event, where there is one.
    pace
        Takes down the waits, where there is one.
    """

    def __init__(self, lanes: Lanes, enabled: bool) -> None:
        self.enabled = enabled
        self._lanes = lanes
        self._nbytes, self._copies = dict.fromkeys(COPYING, 0), dict.fromkeys(COPYING, 0)
        self._stalls = dict.fromkeys(COPYING, 0.0)
        self._pending: list[tuple[Lane, object, object]] = []
        self.tape: Tape | None = None
        self.pace: Pace | None = None
        self._lock = threading.Lock()

    def count(
        self, lane: Lane, nbytes: int, label: int = -1, ends: tuple[object, object] | None = None
    ) -> None:
        """Note one copy of ``nbytes`` bytes, and its ends where they are known."""
        if self.tape is not None and ends is not None:
            self.tape.copied(lane, label, nbytes, ends)
        with self._lock:
            self._nbytes[lane] += nbytes
            self._copies[lane] += 1

    def stall(self, lane: Lane, label: int = -1) -> AbstractContextManager[None]:
        """Time the body as computation waiting for ``lane``; ``label`` says for what."""
        return self._timed(lane, label) if self.enabled else _UNTIMED

    @contextmanager
    def _timed(self, lane: Lane, label: int) -> Iterator[None]:
        start = self._lanes.tick()
        yield
        end = self._lanes.tick()
        if self.tape is not None:
            self.tape.waited(lane, label, (start, end))
        if self.pace is not None:
            self.pace.waited((start, end))
        with self._lock:
            self._pending.append((lane, start, end))
            if len(self._pending) > _MOST_PENDING:
                self._fold(_MOST_PENDING // 2)

    def moved(self) -> dict[Lane, Moved]:
        """Bytes and copies so far."""
        with self._lock:
            return {lane: Moved(lane, self._nbytes[lane], self._copies[lane]) for lane in COPYING}

    def stalls(self) -> dict[Lane, float]:
        """Seconds waited so far; blocks until the device has passed the last wait."""
        with self._lock:
            self._fold(len(self._pending))
            return dict(self._stalls)

    def waits(self) -> Callable[[], float]:
        """Gives the seconds waited until now, whatever follows; blocks as `stalls` when called."""
        with self._lock:
            before, pending = sum(self._stalls.values()), [*self._pending]
        return lambda: sum((self._lanes.seconds(*ends) for _, *ends in pending), before)

    def reset(self) -> None:
        """Start again from zero."""
        with self._lock:
            self._nbytes, self._copies = dict.fromkeys(COPYING, 0), dict.fromkeys(COPYING, 0)
            self._stalls = dict.fromkeys(COPYING, 0.0)
            self._pending.clear()

    def _fold(self, oldest: int) -> None:
        for lane, start, end in self._pending[:oldest]:
            self._stalls[lane] += self._lanes.seconds(start, end)
        del self._pending[:oldest]
