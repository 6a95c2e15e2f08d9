"""A file that does not hold what it should is named, and so is what writes such files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from belady.ir.files import dumps, save
from belady.ir.timeline import Cause, Stall
from tests.cli.support import a_run, belady, documents

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


@pytest.mark.parametrize("content", ["", "{", "[]", '{"belady": "Trace", "version": 1}', "\0\1"])
@pytest.mark.parametrize(
    ("arguments", "bad", "words"),
    [
        (
            ("plan", "trace.json", "--budget", "8MiB", "--hardware", "hardware.json"),
            "trace.json",
            "a trace is what `belady profile -o FILE` writes",
        ),
        (
            ("plan", "trace.json", "--budget", "8MiB", "--hardware", "hardware.json"),
            "hardware.json",
            "a machine is what `belady doctor --json` prints",
        ),
        (
            ("simulate", "trace.json", "plan.json", "--hardware", "hardware.json"),
            "plan.json",
            "a plan is what `belady plan -o FILE` writes",
        ),
        (("explain", "run.json"), "run.json", "a run is what `belady run --report FILE` writes"),
    ],
)
def test_of_several_inputs_the_one_that_is_wrong_is_named(
    arguments: tuple[str, ...],
    bad: str,
    words: str,
    content: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    documents(tmp_path)
    save(a_run().plan, "plan.json")
    Path(bad).write_text(content)
    result = belady(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"belady: {bad}: ")
    assert words in result.stderr
    assert "Traceback" not in result.stderr
