"""The live line never gets in the way of what the script prints."""

from __future__ import annotations

import errno
import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest

from belady.cli.progress import Progress
from tests.cli.support import Stats

ERASE = "\r\x1b[2K"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def terminal(stdout: io.StringIO | None = None, columns: int = 200) -> Iterator[Terminal]:
    """One terminal for both streams, or for stderr alone."""
    screen = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", str(columns))
        patch.setattr(sys, "stdout", stdout or screen)
        patch.setattr(sys, "stderr", screen)
        yield screen
        assert sys.stdout is (stdout or screen)
        assert sys.stderr is screen


def test_line_is_erased_before_the_script_writes() -> None:
    with terminal() as screen, Progress() as progress:
        progress(Stats(1))
        print("loss 0.5")
        progress(Stats(2))
    text = screen.getvalue()
    assert text.index("iteration 1 ") < text.index(ERASE) < text.index("loss 0.5\n")
    assert text.index("loss 0.5\n") < text.index("iteration 2 ")


def test_last_line_stays() -> None:
    with terminal() as screen:
        with Progress() as progress:
            progress(Stats(1))
        lines = screen.getvalue().split(ERASE)
    assert lines[-1].startswith("belady: iteration 1 ")
    assert lines[-1].endswith("\n")


def test_line_keeps_off_an_unfinished_line() -> None:
    with terminal() as screen, Progress() as progress:
        sys.stderr.write("\r 10 %|##")
        progress(Stats(1))
        assert "iteration" not in screen.getvalue()
        sys.stderr.write("\r100 %\n")
        progress(Stats(2))
        assert "iteration 2 " in screen.getvalue()


def test_line_does_not_wrap() -> None:
    with terminal(columns=20) as screen, Progress() as progress:
        progress(Stats(1))
        assert len(screen.getvalue()) <= 20
        assert "\n" not in screen.getvalue()


def test_a_stream_that_is_no_terminal_is_left_alone() -> None:
    file = io.StringIO()
    with terminal(stdout=file), Progress() as progress:
        assert sys.stdout is file
        progress(Stats(1))
        print("loss")
    assert file.getvalue() == "loss\n"


@pytest.mark.parametrize("live", [True, False])
def test_what_is_logged_is_said_until_it_is_closed(live: bool, monkeypatch: Any) -> None:
    log = logging.getLogger("belady")
    before = log.level, list(log.handlers)
    screen = Terminal() if live else io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen)
    with Progress() as progress:
        progress(Stats(1))
        log.info("planning %d ops", 7)
        log.debug("nothing")
    log.info("unheard")
    assert (log.level, list(log.handlers)) == before
    text = screen.getvalue()
    assert text.index("iteration 1 ") < text.index("belady: planning 7 ops")
    assert "unheard" not in text
    assert "nothing" not in text


class Full(io.StringIO):
    """A log on a disk that is full, or whose reader is gone."""

    def __init__(self, live: bool, error: OSError) -> None:
        super().__init__()
        self._live, self._error = live, error

    def isatty(self) -> bool:
        return self._live

    def write(self, text: str) -> int:
        raise self._error


FULL, GONE = OSError(errno.ENOSPC, "No space left"), BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.mark.parametrize(
    "stderr", [None, *(Full(*it) for it in product((True, False), (FULL, GONE)))]
)
def test_what_cannot_be_said_ends_no_training(stderr: Full | None, monkeypatch: Any) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stderr)
    with Progress() as progress:
        progress(Stats(1))
        logging.getLogger("belady").info("planning")
        progress(Stats(2))
    assert sys.stderr is stderr
