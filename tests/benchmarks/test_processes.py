"""The process that measures: it is told what to do, and ends with whoever asked."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from benchmarks.cases import Case
from benchmarks.processes import measure

ROOT = Path(__file__).parents[2]
CASE = Case("resnet50", "plain", precision="fp32", device="cpu", toy=True)
# No pipe holds so much.
LARGE = {"references": {"name": "x" * (1 << 22)}}
T = TypeVar("T")


@pytest.mark.parametrize("known", [{}, LARGE])
def test_a_process_that_takes_too_long_says_so(known: dict[str, Any]) -> None:
    kept: list[Any] = []
    left, ended = measure([CASE], known, 0.1, kept.append)
    assert left == [CASE]
    assert kept == []
    assert "ended after 0 s" in str(ended)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_who_is_ended_leaves_no_process_that_measures(sent: signal.Signals, tmp_path: Path) -> None:
    # More iterations than anybody waits for.
    command = [sys.executable, "-m", "benchmarks", "run", str(tmp_path / "out.jsonl"), "--toy"]
    command += ["--precision", "fp32", "--repeats", "1000000"]
    child: psutil.Process | None = None
    with subprocess.Popen(command, cwd=ROOT) as runs:
        try:
            child = awaited(lambda: measuring(runs.pid))
            # By then it iterates.
            awaited(lambda: child.cpu_times().user >= 6)
            runs.send_signal(sent)
            assert runs.wait(timeout=20) in (-sent, 128 + sent)
            awaited(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
        finally:
            runs.kill()
            if child is not None and child.is_running():
                child.kill()


def measuring(pid: int) -> psutil.Process | None:
    """The process that measures; before it there is one that says what the machine is."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            if "benchmarks.child" in child.cmdline():
                return child
    return None


def awaited(condition: Callable[[], T]) -> T:
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found
