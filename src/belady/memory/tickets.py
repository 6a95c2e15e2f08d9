"""Extents on disk, and the reads and writes of them that are under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from belady.errors import SpillError
from belady.memory.extents import Range

CHUNK = 8 * 2**20


class Ticket:
    """A read or write of an extent under way.

    Attributes
    ----------
    extent
        What is read or written.
    data
        The bytes in memory; None once all parts have ended.
    error
        The first thing that went wrong in a part that has ended.
    begun, over
        The host's clock when the first part began and when the last one ended.
    """

    def __init__(self, what: str, extent: Extent, parts: int, data: Any = None) -> None:
        self.extent = extent
        self.data = data
        self.error: BaseException | None = None
        self.begun = self.over = perf_counter()
        self._what = what
        self._left = parts
        self._untouched = True
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        if parts == 0:
            self.data = None
            self._ended.set()

    @property
    def ended(self) -> bool:
        """Whether all parts have ended."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Block until all parts have ended; Ctrl-C interrupts it.

        Raises
        ------
        SpillError
            If a part failed; the cause is the operating system's error.
        """
        self._ended.wait()
        if self.error is not None:
            # A new exception each time: several threads may wait for one ticket.
            raise SpillError(
                f"{self._what} {self.extent.describe()} failed: {self.error}"
            ) from self.error

    def settle(self) -> None:
        """Block until all parts have ended, well or not."""
        self._ended.wait()

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once all parts have ended, on the thread that ends the last."""
        with self._lock:
            if self._left:
                self._callbacks.append(callback)
                return
        callback()

    def begin_part(self) -> None:
        """Note that a part begins."""
        if self._untouched:
            self._untouched = False
            self.begun = perf_counter()

    def end_part(self, error: BaseException | None = None) -> None:
        """Note that a part has ended."""
        with self._lock:
            self._left -= 1
            self.error = self.error or error
            if self._left:
                return
        self.over = perf_counter()
        self.data = None
        try:
            for callback in self._callbacks:
                callback()
        finally:
            self._ended.set()


@dataclass(eq=False, slots=True)
class Extent:
    """Bytes on disk.

    Attributes
    ----------
    nbytes
        Bytes asked for.
    ranges
        Where they lie in the file, in order, in whole pages.
    """

    nbytes: int
    ranges: list[Range]
    written: Ticket | None = None
    reads: list[Ticket] = field(default_factory=list)
    sums: dict[int, int] = field(default_factory=dict)
    freed: bool = False

    def describe(self) -> str:
        """Name the extent for a message."""
        start = self.ranges[0].start if self.ranges else 0
        return f"a spilled extent of {self.nbytes} bytes at offset {start}"

    def chunks(self) -> list[tuple[int, slice]]:
        """Offsets in the file and the bytes that lie there, at most `CHUNK` each."""
        out = []
        first = 0
        for part in self.ranges:
            for offset in range(part.start, part.end, CHUNK):
                last = min(first + min(CHUNK, part.end - offset), self.nbytes)
                out.append((offset, slice(first, last)))
                first = last
        return out
