"""One exit code for each kind of error."""

from __future__ import annotations

import errno

import pytest
import typer

import belady.errors as errors
from belady.cli.exits import code_of, mapped
from tests.cli.support import belady

INFEASIBLE = errors.InfeasibleBudgetError(
    needed_bytes=3, budget_bytes=1, smallest_bytes=2, op="conv\x1b[2J", module="a\nb"
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.BudgetError("x"), 2),
        (errors.DocumentError("x"), 2),
        (errors.PlanMismatchError("x"), 2),
        (FileNotFoundError("x"), 2),
        (INFEASIBLE, 3),
        (errors.OutOfMemoryError("x"), 5),
        (errors.TierFullError("x"), 5),
        (OSError(errno.ENOSPC, "x"), 5),
        (errors.SpillError("x"), 1),
        (errors.MissingExtraError("x"), 1),
        (errors.StaleValueError("x"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_codes(error: BaseException, code: int) -> None:
    assert code_of(error) == code


def test_infeasible_names_the_way_out_and_nothing_steers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(typer.Exit) as caught, mapped():
        raise INFEASIBLE
    assert caught.value.exit_code == 3
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("belady: ")
    assert "conv\\x1b[2J" in lines[0]
    assert lines[1] == "belady: the smallest that works: --budget 2 (2 B)"


def test_what_was_noted_of_an_error_is_told_too(capsys: pytest.CaptureFixture[str]) -> None:
    error = errors.SpillError("no disk")
    error.add_note("another folder\x1b[2J")
    error.add_note("or less")
    with pytest.raises(typer.Exit), mapped():
        raise error
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["belady: no disk", "belady: another folder\\x1b[2J", "belady: or less"]


def test_a_bug_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError), mapped():
        raise ZeroDivisionError


def test_a_closed_pipe_is_left_to_typer() -> None:
    with pytest.raises(BrokenPipeError), mapped():
        raise BrokenPipeError(errno.EPIPE, "closed")


def test_what_the_command_shows_of_itself_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("belady.cli.show_line", full)
    result = belady("--version")
    assert result.exit_code == 5
    assert result.stderr == "belady: [Errno 28] No space left on device\n"
