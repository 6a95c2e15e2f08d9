"""Figures in the README are those of the committed results."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.records import committed
from benchmarks.tables import figures, with_figures

ROOT = Path(__file__).parents[2]


def test_readme_shows_the_results() -> None:
    text = (ROOT / "README.md").read_text()
    assert with_figures(text, figures(committed())) == text, "run `python -m benchmarks tables`"


def test_a_changed_result_is_noticed() -> None:
    changed = json.loads(json.dumps(committed()))
    next(r for r in changed if r["outcome"] == "ok")["median_seconds"] *= 1.5
    text = (ROOT / "README.md").read_text()
    assert with_figures(text, figures(changed)) != text


def test_results_name_machine_and_versions_and_keep_repeats() -> None:
    for record in committed():
        assert {"device_name", "torch", "cuda", "belady", "seed", "outcome"} <= record.keys()
        if record["outcome"] == "ok":
            assert len(record["seconds"]) > 1
