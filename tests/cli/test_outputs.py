"""What a verb would write is looked at before any work: no input is lost, and no work."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from belady.cli.show import show_line, show_table
from belady.ir.files import load, save
from belady.ir.run import Run
from tests.cli.support import FakeMemory, a_run, belady, documents

Script = Callable[..., str]

WRITING = [
    (("plan", "trace.json", "--budget", "8MiB", "--hardware", "hardware.json", "-o"), "trace.json"),
    (
        ("plan", "trace.json", "--budget", "8MiB", "--hardware", "hardware.json", "-o"),
        "hardware.json",
    ),
    (("report", "run.json", "-o"), "run.json"),
    (("trace", "run.json", "-o"), "run.json"),
    (("trace", "run.json", "--merge", "profile.json", "-o"), "profile.json"),
    (("plot", "memory", "run.svg", "-o"), "run.svg"),
]
TRAINING = [
    ("run", "--budget", "1GiB", "--report"),
    ("profile", "-o"),
]
STEP = """
import os, torch
print("ran")
os.chdir("elsewhere")
torch.nn.Linear(3, 1)(torch.ones(2, 3)).sum().backward()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    documents(tmp_path)
    for name in ("run.json", "run.svg"):
        save(a_run(), name)
    Path("profile.json").write_text('{"traceEvents": []}')
    Path("elsewhere").mkdir()
    return tmp_path


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("arguments", "given"), WRITING)
@pytest.mark.parametrize("name", ["{}", "./elsewhere/../{}", "link-{}"])
def test_no_input_is_replaced(
    arguments: tuple[str, ...], given: str, name: str, folder: Path
) -> None:
    Path(f"link-{given}").symlink_to(given)
    before = contents(folder)
    result = belady(*arguments, name.format(given))
    assert result.exit_code == 2
    assert "is an input too" in " ".join(result.stderr.replace("│", "").split())
    assert contents(folder) == before


@pytest.mark.parametrize("arguments", TRAINING)
def test_no_script_is_replaced(arguments: tuple[str, ...], script: Script, folder: Path) -> None:
    path = script(STEP)
    result = belady(*arguments, path, path)
    assert result.exit_code == 2
    assert "is an input too" in " ".join(result.stderr.replace("│", "").split())
    assert result.stdout == ""
    assert Path(path).read_text() == STEP


@pytest.mark.parametrize("arguments", TRAINING)
@pytest.mark.parametrize("output", ["none/run.json", "elsewhere", "train.py/run.json"])
def test_no_script_runs_for_what_cannot_be_written(
    arguments: tuple[str, ...], output: str, script: Script, folder: Path
) -> None:
    path = script(STEP)
    before = contents(folder)
    result = belady(*arguments, output, path)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"belady: {output}: ")
    assert result.stdout == ""
    assert contents(folder) == before


@pytest.mark.parametrize("arguments", TRAINING)
def test_a_script_that_goes_elsewhere_does_not_take_the_output_along(
    arguments: tuple[str, ...], memory: type[FakeMemory], script: Script, folder: Path
) -> None:
    memory.run_document = a_run()
    result = belady(*arguments, "out.json", script(STEP))
    assert result.exit_code == 0, result.stderr
    kind = Run if arguments[0] == "run" else type(a_run().trace)
    assert load(kind, folder / "out.json")
    assert not list((folder / "elsewhere").iterdir())


def test_what_a_stream_has_no_letters_for_is_shown_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii", write_through=True))
    show_line("12 µs in Größe")
    show_table("µ", ["name", "time"], [["ö", "3 µs"]])
    shown = written.getvalue().decode("ascii")
    assert "12 us in Gr\\xf6\\xdfe\n" in shown
    assert "\\xf6" in shown
    assert "3 us" in shown
