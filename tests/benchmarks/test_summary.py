"""README's tables: each peer within its smallest cap, and ours in no more memory."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.summary import tables
from tests.benchmarks.test_figures import record


def peer(method: str, cap: int, seconds: float, **more: Any) -> dict[str, Any]:
    return record(method, cap, seconds, budget="smallest", **more)


def cells(found: list[dict[str, Any]]) -> list[str]:
    """Of the only workload there is: its name, plain and the peers."""
    (line,) = (line for line in tables(found).splitlines() if line.startswith("| resnet50"))
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(
    ("ours", "cell"),
    [
        ([record("belady:auto", 4, 0.08)], "100 → **80** in 5.00"),
        # Of several the fastest, by whichever engine has the same kernels.
        (
            [record("belady:auto", 4, 0.08), record("belady-graph:auto", 5, 0.07)],
            "100 → **70** in 5.00",
        ),
        ([record("belady:auto", 4, 0.12)], "100 → 120 (slower) in 5.00"),
        ([record("belady:auto", 4, 0.0995)], "100 → 100 in 5.00"),
        ([record("belady:auto", 4, 0.05, allocation_retries=3)], "100 → flushes in 5.00"),
        ([record("belady:auto", 6, 0.05)], "100 → ? in 5.00"),
        ([record("belady-inductor:auto", 4, 0.05)], "100 → ? in 5.00"),
    ],
)
def test_ours_is_beside_a_peer_in_no_more_memory(ours: list[dict[str, Any]], cell: str) -> None:
    plain = record("plain", 11, 0.06, budget="none")
    found = [plain, peer("checkpoint", 5, 0.1), *ours]
    assert cells(found) == ["resnet50, bf16 (a)", "60", cell, "", "", ""]


def test_a_peer_counts_where_it_passed_by_the_median_of_its_rounds() -> None:
    ours = record("belady:auto", 3, 0.08)
    flushing = peer("save_on_cpu", 4, 0.3, allocation_retries=2)
    stated = record("trl", 4, 0.4)
    twice = [peer("checkpoint", 6, 0.09), peer("checkpoint", 6, 0.1)]
    assert cells([ours, flushing, stated, *twice])[2:] == ["95 → **80** in 6.00", "", "", ""]


def test_kernels_have_tables_of_their_own() -> None:
    eager = [peer("checkpoint", 5, 0.1), record("belady:auto", 5, 0.08)]
    fused = [peer("inductor-0.5", 5, 0.06), record("belady-inductor:auto", 5, 0.07)]
    (one, other) = tables([*eager, *fused]).split("\n\n**Inductor")
    assert "faster in 1 of 1 caps and slower in 0." in one
    assert "faster in 0 of 1 caps and slower in 1." in other
    assert "| 60 → 70 (slower) in 5.00 |" in other


def test_what_is_not_judged_is_counted_apart() -> None:
    peers = [peer("checkpoint", 5, 0.1), peer("trl", 4, 0.1), peer("save_on_cpu", 3, 0.1)]
    ours = [record("belady:auto", 5, 0.1), record("belady:auto", 4, 0.01, allocation_retries=1)]
    failed = record("belady:auto", 0, 0.0, budget="100%:save_on_cpu", outcome="infeasible")
    for known, last in ([], "`?`"), ([failed], "`does not fit`"):
        said = tables([*peers, *ours, *known]).partition("\n")[0]
        # As fast as the peer, but for what two runs differ by, is neither.
        assert "faster in 0 of 1 caps and slower in 0; " in said
        assert f"{last} in 1 more" in said
        assert "`flushes` in 1 more" in said


def test_nothing_is_shown_without_peers() -> None:
    assert tables([record("belady:auto", 5, 0.08)]) == "No records yet.\n"
