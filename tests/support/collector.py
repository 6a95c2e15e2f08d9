"""Python's collector, with a threshold of a test's own."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def thresholds(*wanted: int) -> Iterator[None]:
    """Let the collector come after so many new objects, and as before afterwards."""
    before = gc.get_threshold()
    gc.set_threshold(*wanted)
    try:
        yield
    finally:
        gc.set_threshold(*before)
