"""A command in this process, and the status that it ends with."""

from __future__ import annotations

import signal
import sys

import pytest

from benchmarks.__main__ import main


def status_of(command: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """Status of a command; this process keeps its handlers of signals."""
    monkeypatch.setattr(sys, "argv", ["benchmarks", *command])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        sys.exit(main())
    return ended.value.code
