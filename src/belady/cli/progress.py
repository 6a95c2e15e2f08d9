"""Progress of a script on stderr, never in the way of what the script itself prints."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from belady.cli.options import NO_LIMIT
from belady.cli.show import Notes, note
from belady.units import format_bytes, format_seconds, printable

if TYPE_CHECKING:
    from belady.measure.stats import IterationStats

_PLAIN_EVERY_S = 10.0
_LOG = logging.getLogger("belady")


class _Shared:
    """A stream of the script on the terminal that also shows our line.

    The line is taken away before the script writes, and stays away while the script has an
    unfinished line of its own there (a progress bar).
    """

    def __init__(self, stream: TextIO, line: _LiveLine) -> None:
        self._stream = stream
        self._line = line

    def write(self, text: str) -> int:
        self._line.clear()
        if text:
            self._line.hidden = not text.endswith("\n")
        return self._stream.write(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


class _LiveLine:
    """One line at the bottom of the terminal, written over and over."""

    def __init__(self) -> None:
        self._console = Notes(sys.stderr)
        self._streams = (sys.stdout, sys.stderr)
        self._shown = False
        self.hidden = False
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                setattr(sys, name, _Shared(stream, self))

    def show(self, text: str) -> None:
        self.clear()
        if not self.hidden:
            self._console.print(Text(text), end="", no_wrap=True, overflow="ellipsis")
            self._shown = True

    def clear(self) -> None:
        if self._shown:
            self._shown = False
            erase = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))
            self._console.control(erase)

    def close(self) -> None:
        self.clear()
        sys.stdout, sys.stderr = self._streams


class Progress(logging.Handler):
    """Called once an iteration: a live line on a terminal, a line now and then elsewhere.

    Between iterations it says what belady logs: planning takes seconds.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        # There is none where it was closed before.
        shown = sys.stderr is not None and sys.stderr.isatty()
        self._line = _LiveLine() if shown else None
        self._phase = ""
        self._spoke = 0.0
        self._unsaid: IterationStats | None = None

    def __enter__(self) -> Progress:
        self._level = _LOG.level
        _LOG.addHandler(self)
        _LOG.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        _LOG.removeHandler(self)
        _LOG.setLevel(self._level)
        if self._line is not None:
            self._line.close()
        if self._unsaid is not None:
            self._note(_describe(self._unsaid))

    def emit(self, record: logging.LogRecord) -> None:
        """Show one message."""
        self._say(record.getMessage())

    def __call__(self, stats: IterationStats) -> None:
        """Show one iteration."""
        self._unsaid = stats
        now = time.monotonic()
        if self._line is not None:
            self._say(_describe(stats))
        elif stats.phase != self._phase or now - self._spoke >= _PLAIN_EVERY_S:
            self._note(_describe(stats))
            self._phase, self._spoke, self._unsaid = stats.phase, now, None

    def _say(self, text: str) -> None:
        if self._line is None:
            self._note(text)
            return
        with suppress(OSError):
            self._line.show(f"belady: {printable(text)}")

    def _note(self, text: str) -> None:
        # A full disk or a reader that is gone ends nobody's training.
        with suppress(OSError):
            note(text)


def _describe(stats: IterationStats) -> str:
    text = f"iteration {stats.index} ({stats.phase}): {format_seconds(stats.seconds)}"
    if stats.peak_bytes > 0:  # it is not counted in every iteration of a CPU
        text += f", peak {format_bytes(stats.peak_bytes)}"
        if stats.budget_bytes < NO_LIMIT:
            text += f" of {format_bytes(stats.budget_bytes)}"
    if stats.stall_seconds > 0:
        text += f", waited {format_seconds(stats.stall_seconds)}"
    return text
