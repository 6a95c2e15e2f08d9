"""The verbs and options are frozen: what users have written must go on working."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from belady import __version__
from belady.cli import app
from tests.cli.support import belady, child, documents

OPTIONS = {
    "demo": {"--device", "--budget", "--iterations", "--engine"},
    "doctor": {"--device", "--spill-dir", "--refresh", "--json"},
    "explain": {"--json"},
    "plan": {
        *("--budget", "--policy", "--hardware", "--host-budget", "--disk-budget"),
        *("-o", "--output", "--json"),
    },
    "plot": {"-o", "--output", "--columns"},
    "profile": {
        *("-o", "--output", "--iterations", "--engine", "--spill-dir", "-m", "--module"),
    },
    "report": {"-o", "--output"},
    "run": {
        *("--budget", "--policy", "--host-budget", "--disk-budget", "--spill-dir", "--report"),
        *("--engine", "--exact", "--verify", "-m", "--module"),
    },
    "simulate": {"--hardware", "--json"},
    "trace": {"-o", "--output", "--merge", "--merge-at"},
}


def test_verbs_and_options_are_frozen() -> None:
    group = typer.main.get_command(app)
    found = {
        name: {
            option
            for parameter in command.params
            for option in parameter.opts
            if option.startswith("-")
        }
        for name, command in group.commands.items()  # type: ignore[attr-defined]
    }
    assert found == OPTIONS


def test_version() -> None:
    result = belady("--version")
    assert (result.exit_code, result.stdout) == (0, f"belady {__version__}\n")


@pytest.mark.parametrize("verb", ["", *OPTIONS])
def test_help_says_what_it_does(verb: str) -> None:
    result = belady(*filter(None, [verb]), "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["fly"],
        ["plan"],
        ["plan", "trace.json", "--budget", "8GiB", "--fast"],
        ["run", "--budget", "8GiB"],
        ["run", "script.py"],
        ["run", "--budget", "8GiB", "--policy", "best", "script.py"],
        ["run", "--budget", "much", "script.py"],
        ["run", "--budget", "8GiB", "--host-budget", "-1", "script.py"],
        ["run", "--budget", "8GiB", "no-such-script.py"],
        ["run", "--budget", "8GiB", "-m", "no.such.module"],
        ["profile", "no-such-script.py"],
        ["doctor", "--device", "toaster"],
        ["doctor", "--device", "meta"],
        ["doctor", "--device", "cuda:99"],
        ["plan", "no-such-trace.json", "--budget", "8GiB"],
        ["trace", "no-such-run.json", "-o", "timeline.json"],
        ["trace", "no-such-run.json"],
        ["plot", "memory", "no-such-run.json", "-o", "figure.svg"],
        ["plot", "pie", "no-such-run.json", "-o", "figure.svg"],
    ],
)
def test_wrong_use_exits_with_2(arguments: list[str]) -> None:
    result = belady(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr
    assert "Traceback" not in result.stderr


def test_wrong_use_cannot_steer_the_terminal() -> None:
    result = belady("run", "--budget", "8GiB", "--policy", "\x1b[2Jbest", "script.py")
    assert result.exit_code == 2
    assert "\x1b" not in re.sub(r"\x1b\[[\d;]*m", "", result.stderr)


def test_help_plan_and_simulate_do_not_wait_for_torch(tmp_path: Path) -> None:
    trace, hardware = documents(tmp_path)
    plan = tmp_path / "plan.json"
    verbs = [
        ["--help"],
        ["plan", trace, "--budget", "8MiB", "--hardware", hardware, "-o", plan],
        ["simulate", trace, plan, "--hardware", hardware],
    ]
    code = f"""
import sys
from typer.testing import CliRunner
from belady.cli import app
for arguments in {[[str(word) for word in verb] for verb in verbs]}:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], env=child(), check=False).returncode == 0
