"""Python's garbage collector, out of the way of work that leaves it nothing to collect."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
