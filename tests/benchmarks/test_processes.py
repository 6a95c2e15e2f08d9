"""The process that measures: it is told what to do, and ends with whoever asked."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from benchmarks import processes
from benchmarks.cases import Case
from benchmarks.processes import measure

ROOT = Path(__file__).parents[2]
CASE = Case("resnet50", "plain", precision="fp32", device="cpu", toy=True)
# No pipe holds so much.
LARGE = {"references": {"name": "x" * (1 << 22)}}
# The command, but for a process before the one that measures, which says what the machine is.
AT_ONCE = """
import sys
from benchmarks import sweep
from benchmarks.__main__ import main
sweep.here = lambda device: {"device_name": "a device", "torch": "2"}
sys.exit(main())
"""
T = TypeVar("T")


@pytest.mark.parametrize("known", [{}, LARGE])
def test_a_process_that_takes_too_long_says_so(known: dict[str, Any]) -> None:
    kept: list[Any] = []
    left, ended = measure([CASE], known, 0.1, kept.append)
    assert left == [CASE]
    assert kept == []
    assert "ended after 0 s" in str(ended)


@pytest.mark.parametrize(
    ("sent", "at_once"),
    # Where one is measured at once that is killed nothing is otherwise than in a lane of two.
    [(signal.SIGTERM, "1"), (signal.SIGKILL, "2"), (signal.SIGINT, "2")],
)
def test_who_is_ended_leaves_no_process_that_measures(
    sent: signal.Signals, at_once: str, tmp_path: Path
) -> None:
    # More iterations than anybody waits for.
    command = [sys.executable, "-c", AT_ONCE, "run", str(tmp_path / "out.jsonl"), "--toy"]
    command += ["--precision", "fp32", "--repeats", "1000000", "--at-once", at_once]
    command += ["--rounds", "1"]
    child: psutil.Process | None = None
    # What is started in the background by a shell has Ctrl-C ignored, and so would its children.
    heard = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, cwd=ROOT, preexec_fn=heard) as runs:
        try:
            child = awaited(lambda: measuring(runs.pid))
            awaited(partial(iterates, child))
            runs.send_signal(sent)
            assert runs.wait(timeout=20) in (-sent, 128 + sent)
            awaited(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
        finally:
            runs.kill()
            if child is not None and child.is_running():
                child.kill()


def measuring(pid: int) -> psutil.Process | None:
    """The process that measures, once it has begun."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            if "benchmarks.child" in child.cmdline():
                return child
    return None


def iterates(child: psutil.Process) -> bool:
    """Whether it computes and reads no more: until it iterates there are modules to load."""
    read, spent = child.io_counters().read_chars, child.cpu_times().user
    awaited(lambda: child.cpu_times().user >= spent + 1)
    return child.io_counters().read_chars == read


def awaited(condition: Callable[[], T]) -> T:
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


# Stands for the process that measures: it reads what it is asked, tells something, and ends.
TELLS = """
import os, subprocess, sys
sys.stdin.readline()
print("looking for slices", file=sys.stderr, flush=True)
{more}
print("the reason", file=sys.stderr, flush=True)
sys.exit(3)
"""
LEFT_BEHIND = (
    "subprocess.Popen(['sleep', '30'], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)"
)
MUCH = r"os.write(2, b'\xff' + b'y' * (1 << 20) + b'\n')"


@pytest.mark.parametrize("more", ["", LEFT_BEHIND, MUCH])
def test_what_a_process_tells_is_shown_and_its_end_is_kept(
    more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child = tmp_path / "benchmarks" / "child.py"
    child.parent.mkdir()
    child.write_text(TELLS.format(more=more))
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    monkeypatch.setattr(processes, "_TELLS", 1.0 if more == LEFT_BEHIND else 20.0)
    begun = time.monotonic()
    left, ended = measure([CASE], {}, 25, print)
    assert time.monotonic() - begun < 20
    assert left == [CASE]
    assert ended is not None
    assert "ended with 3" in ended
    assert ended.endswith("the reason\n")
    shown = capsys.readouterr().err
    assert shown.startswith("looking for slices\n")
    assert shown.endswith("the reason\n")


def test_nobody_need_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = tmp_path / "benchmarks" / "child.py"
    child.parent.mkdir()
    child.write_text(TELLS.format(more=MUCH))
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    _, ended = measure([CASE], {}, 25, print)
    assert str(ended).endswith("the reason\n")


def test_the_case_that_ends_a_process_is_the_first_and_what_was_found_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "benchmarks" / "child.py"
    child.parent.mkdir()
    says = """print('{"workload": 1, "outcome": "found"}', flush=True)"""
    child.write_text(TELLS.format(more=says))
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    search, other = replace(CASE, budget="smallest"), replace(CASE, round=1)
    kept: list[Any] = []
    left, ended = measure([search, other], {}, 25, kept.append)
    assert left == [other, search]
    assert kept == [{"workload": 1, "outcome": "found"}]
    assert "ended with 3" in str(ended)
