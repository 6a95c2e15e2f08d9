"""The saving, proved by the system and not by our own count.

Plain training dies under a limit on the process's private memory that managed training keeps.
Shared mappings escape that limit (RLIMIT_DATA), so resident memory is compared as well.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.support import child

pytest.importorskip("sklearn")

CHILD = Path(__file__).with_name("child_under_limit.py")
# The third is the first that is planned.
ITERATIONS = 4
# One thread and few arenas, so that memory differs by what training holds; and plain PyTorch gets
# the allocator setting that belady makes, so that it does not die of its absence.
QUIET = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 20),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux alone")
def test_training_lives_where_plain_training_dies(tmp_path: Path) -> None:
    environment = {**child(), **QUIET, "XDG_CACHE_HOME": str(tmp_path)}
    with serving(environment) as run:
        compare(run)


Run = Callable[..., dict[str, Any]]


@contextmanager
def serving(environment: dict[str, str]) -> Iterator[Run]:
    """Has each training done by a process of its own."""
    command = [sys.executable, str(CHILD)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        asked, answers = server.stdin, server.stdout

        def run(mode: str, limit: int = 0, budget: int = 0) -> dict[str, Any]:
            print(mode, ITERATIONS, limit, budget, file=asked, flush=True)
            found: dict[str, Any] = json.loads(answers.readline())
            return found

        try:
            yield run
        finally:
            asked.close()


def compare(run: Run) -> None:
    # This also measures the disk, which takes memory of its own, and remembers the result.
    peak = run("look")["peak"]
    budget = peak * 3 // 10
    plain = run("plain")
    saving = peak - budget
    # The system sees most of what our own count says.
    limit = plain["data"] - saving // 2
    dead = run("plain", limit)
    alive = run("managed", limit, budget)

    assert dead["error"] is not None
    assert "memory" in dead["error"].lower()
    assert dead["losses"] == []
    assert alive["error"] is None
    assert alive["losses"] == plain["losses"]
    assert len(alive["losses"]) == ITERATIONS
    assert plain["data"] - alive["data"] > saving / 2
    assert plain["resident"] - alive["resident"] > saving / 2
