"""Figures in README and docs are those of the committed results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.records import committed
from benchmarks.tables import PAGES, generated, plots

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", PAGES)
def test_page_shows_the_results(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    assert generated(page, text, committed()) == text, "run `python -m benchmarks tables`"


def test_plots_are_there() -> None:
    assert [path for path in plots(committed()) if not path.exists()] == []


def test_a_changed_result_is_noticed() -> None:
    changed = json.loads(json.dumps(committed()))
    next(r for r in changed if r["outcome"] == "ok")["median_seconds"] *= 1.5
    text = (ROOT / "README.md").read_text("utf-8")
    assert generated("README.md", text, changed) != text


def test_results_name_machine_and_versions_and_keep_repeats() -> None:
    for record in committed():
        if record["outcome"] in ("absent", "crash"):
            continue
        assert {"device_name", "torch", "cuda", "belady", "seed"} <= record.keys()
        if record["outcome"] == "ok" and record["method"] != "bound":
            assert len(record["seconds"]) > 1
