"""report: a run in, a page out, and what is said when it cannot be."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from belady.ir.files import save
from tests.cli.support import a_run, belady, child, documents


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run, alone in the present folder."""
    monkeypatch.chdir(tmp_path)
    save(a_run(), "run.json.gz")
    return Path("run.json.gz")


def test_a_page_is_written(run: Path, tmp_path: Path) -> None:
    result = belady("report", run, "-o", "page.html")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    assert result.stderr == "belady: page.html: open it in a browser\n"
    text = Path("page.html").read_text("utf-8")
    assert text.startswith("<!doctype html>")
    assert text.endswith("</html>")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "page.html", tmp_path / "run.json.gz"]


def test_it_has_a_usual_name_and_is_the_same_every_time(run: Path) -> None:
    contents = set()
    for _ in range(2):
        assert belady("report", run).exit_code == 0
        contents.add(Path("report.html").read_bytes())
    assert len(contents) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.json"], "none.json: No such file"),
        (["trace.json"], "a run is what `belady run --report FILE` writes"),
        (["empty.json"], "empty.json: document: not JSON"),
        (["run.json.gz", "-o", "none/page.html"], "none/page.html: No such file"),
        (["run.json.gz", "-o", "folder"], "folder: Is a directory"),
        (["run.json.gz", "-o", "run.json.gz"], "is an input too"),
        ([], "RUN"),
    ],
)
@pytest.mark.usefixtures("run")
def test_what_cannot_be_shown_is_refused(
    arguments: list[object], words: str, tmp_path: Path
) -> None:
    documents(tmp_path)
    Path("empty.json").touch()
    Path("folder").mkdir()
    before = {path: path.stat().st_size for path in tmp_path.rglob("*")}
    result = belady("report", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert {path: path.stat().st_size for path in tmp_path.rglob("*")} == before


def test_a_full_disk_leaves_the_page_that_was_there(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("report.html").write_text("old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    result = belady("report", run)
    assert result.exit_code == 5
    assert "report.html: No space left on device" in result.stderr
    assert Path("report.html").read_text() == "old"
    assert len(list(Path().iterdir())) == 2


def test_it_does_not_wait_for_torch(run: Path) -> None:
    code = f"""
import sys
from typer.testing import CliRunner
from belady.cli import app
assert CliRunner().invoke(app, ["report", {str(run)!r}]).exit_code == 0
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], env=child(), check=False).returncode == 0
