"""`belady run` with nothing replaced: a script gives what it gives under python."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from belady.cli.exits import UNVERIFIED
from belady.ir.files import load
from belady.ir.run import Run
from belady.ir.trace import Source, Tier, Trace
from belady.virtual import VirtualMemory
from tests.cli.support import belady, child

TRAIN = """
import sys, torch
torch.manual_seed(0)

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x):
        x = x + self.down(torch.relu(self.up(x)))
        return x

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, x, *, scale):
        x = self.blocks(x) * scale
        return x

net, loss_of = Net(), torch.nn.MSELoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(7):
    loss = loss_of(net(torch.randn(512, 64), scale=2.0), torch.zeros(512, 64))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
sys.exit(len(sys.argv))
"""
SMALL = 3 << 20
SHORT_BUDGET = 1 << 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = tmp_path_factory.mktemp("script") / "train.py"
    written.write_text(TRAIN)
    return written


@pytest.fixture(scope="module")
def python(path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the script with arguments, under python or what is given in its place."""

    def run(*before: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *map(str, before), str(path), "--a", "b"],
            env={**child(), "XDG_CACHE_HOME": str(path.parent)},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture(scope="module")
def plain(
    python: Callable[..., subprocess.CompletedProcess[str]],
) -> subprocess.CompletedProcess[str]:
    return python()


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_same_output_and_code_as_python(
    python: Callable[..., subprocess.CompletedProcess[str]],
    plain: subprocess.CompletedProcess[str],
    tmp_path: Path,
    engine: str,
) -> None:
    report = tmp_path / "run.json"
    options = ("--engine", engine, "--report", report, "--verify")
    managed = python("-m", "belady", "run", "--budget", SMALL, *options)
    assert plain.returncode == 3
    assert (managed.stdout, managed.returncode) == (plain.stdout, 3), managed.stderr
    assert "\nbelady: iteration 7 " in managed.stderr
    run = load(Run, report)
    assert run.trace.source is (Source.GRAPH if engine == "graph" else Source.EAGER)
    assert not run.plan.moves_nothing
    assert run.measured is not None
    assert run.measured.level == 2
    assert 0 < run.measured.peak(Tier.DEVICE) <= SMALL
    first, second = run.measured.numbers
    assert f"iteration {first} (verified)" in managed.stderr
    assert first + 1 == second < run.measured.recorded <= 7
    assert max(span.end_s for span in run.measured.spans) <= run.measured.recorded_seconds * 1.05


# Nothing of the script refers to itself: its model is gone as soon as its names are.
SHORT = """
import torch
from torch import nn

layers = [it for _ in range(3) for it in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())]
net = nn.Sequential(*layers)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(8):
    net(torch.randn(512, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_what_was_learned_outlives_the_model(
    script: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report, options = tmp_path / "run.json", ("--engine", engine, "--verify")
    ended = belady("run", "--budget", SHORT_BUDGET, *options, "--report", report, script(SHORT))
    assert ended.exit_code == 0, ended.stderr
    assert "nothing was managed" not in ended.stderr
    run = load(Run, report)
    assert not run.plan.moves_nothing
    assert run.measured is not None
    assert run.measured.recorded > 0
    monkeypatch.setattr(VirtualMemory, "verified", property(lambda _: False))
    over = belady("run", "--budget", SHORT_BUDGET, *options, script(SHORT))
    assert over.exit_code == UNVERIFIED


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_a_trace_outlives_the_model(
    script: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    output = tmp_path / "trace.json"
    ended = belady("profile", "-o", output, "--engine", engine, script(SHORT))
    assert ended.exit_code == 0, ended.stderr
    assert len(load(Trace, output).saved) > 6
