"""Python's garbage collector, out of the way of work that leaves it little to collect."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# New objects before it looks at them, while it comes seldom.
_MANY = 100_000


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause it: where much is made that stays for a while, it looks at all of that again and again.

    That takes a third of the time in which a run of 30,000 ops is read, and then drawn.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Seldom:
    """Has it come seldom while anybody is inside, in whichever thread.

    What a forward saves is there until backward, and then goes by itself. Each time that the
    collector finds some of it alive, more counts as old; and once a quarter more does, it looks at
    all there is, which takes longer than an iteration where a graph of thousands of ops is there.

    It is not switched off: others switch it as well, and who reads that it is off while somebody
    else has it off for a moment can leave it off for good.
    """

    def __init__(self) -> None:
        # The collector itself may end a block of a thread that begins or ends one.
        self._lock = threading.RLock()
        self._inside = 0
        self._before = gc.get_threshold()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Be inside."""
        with self._lock:
            if not self._inside:
                self._before = gc.get_threshold()
                # Zero is off.
                if 0 < self._before[0] < _MANY:
                    gc.set_threshold(_MANY, *self._before[1:])
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside and gc.get_threshold()[0] == _MANY:
                    gc.set_threshold(*self._before)


seldom_collected = Seldom()
