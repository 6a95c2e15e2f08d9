"""Figures in README and docs are those of the committed results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.records import committed
from benchmarks.tables import PAGES, differing, generated, plots

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", PAGES)
def test_page_shows_the_results(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    assert generated(page, text, committed()) == text, "run `python -m benchmarks tables`"


def test_plots_show_the_results() -> None:
    assert differing(plots(committed())) == [], "run `python -m benchmarks tables`"


def test_a_changed_point_is_noticed() -> None:
    drawn = plots(committed())
    path, of = next(iter(drawn.items()))
    measured = next(record for record in of if "median_seconds" in record)
    slower = {**measured, "median_seconds": 2 * measured["median_seconds"]}
    assert differing({**drawn, path: [*of, {**slower, "budget": "another"}]}) == [path]
    assert differing({**drawn, path: [slower if it is measured else it for it in of]}) == [path]


def test_a_plot_too_few_or_too_many_is_noticed() -> None:
    drawn = plots(committed())
    path, of = drawn.popitem()
    assert differing(drawn) == [path]
    missing = path.with_name("missing.svg")
    assert differing({**drawn, path: of, missing: of}) == [missing]


@pytest.mark.parametrize(("page", "method"), [("README.md", "checkpoint"), ("docs/tables.md", "")])
def test_a_changed_result_is_noticed(page: str, method: str) -> None:
    changed = json.loads(json.dumps(committed()))
    ran = (r for r in changed if r["outcome"] == "ok" and r.get("group"))
    next(r for r in ran if method in ("", r["method"]))["median_seconds"] *= 1.5
    text = (ROOT / page).read_text("utf-8")
    assert generated(page, text, changed) != text


def test_results_name_machine_and_versions_and_keep_repeats() -> None:
    for record in committed():
        if record["outcome"] in ("absent", "crash"):
            continue
        assert {"device_name", "torch", "cuda", "belady", "seed"} <= record.keys()
        if record["outcome"] == "ok" and record["method"] != "bound":
            assert len(record["seconds"]) > 1
