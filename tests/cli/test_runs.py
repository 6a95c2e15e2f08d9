"""A run that is not one is refused by every verb that draws it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from belady.ir.files import dumps
from belady.ir.timeline import Cause, Stall
from tests.cli.support import a_run, belady

GOOD = a_run()


@pytest.fixture(params=["report", "trace", "plot memory", "plot timeline"])
def verb(request: pytest.FixtureRequest) -> list[str]:
    name: str = request.param
    return name.split()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"op":7,', '"op":999,', "predicted.stalls[0].op: 999 is not between"),
        (GOOD.trace.fingerprint, "0" * 16, f"its trace is {GOOD.trace.fingerprint}"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    old: str, new: str, words: str, verb: list[str], tmp_path: Path
) -> None:
    late = replace(GOOD.predicted, stalls=(Stall(Cause.HOST, 7, -1, 0.5),))
    text = dumps(replace(GOOD, predicted=late))
    head, found, tail = text.rpartition(old)
    assert found
    run = tmp_path / "run.json"
    run.write_text(f"{head}{new}{tail}")
    output = tmp_path / "out.svg"
    result = belady(*verb, run, "-o", output)
    assert result.exit_code == 2
    assert f"{run}: " in result.stderr
    assert words in result.stderr
    assert "a run is what `belady run --report FILE` writes" in result.stderr
    assert "Traceback" not in result.stderr
    assert not output.exists()
