"""`belady run` with nothing replaced: a script gives what it gives under python."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from belady.ir.files import load
from belady.ir.run import Run
from tests.cli.support import child

TRAIN = """
import sys, torch
torch.manual_seed(0)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())

    def forward(self, x, *, scale):
        return self.layers(x) * scale

net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(6):
    loss = net(torch.randn(256, 64), scale=2.0).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
sys.exit(len(sys.argv))
"""


def test_same_output_and_code_as_python(script: Callable[..., str], tmp_path: Path) -> None:
    path, report = script(TRAIN), tmp_path / "run.json"
    environment = {**child(), "XDG_CACHE_HOME": str(tmp_path)}
    run = ("-m", "belady", "run", "--budget", "1GiB", "--report", str(report))
    plain, managed = (
        subprocess.run(
            [sys.executable, *before, path, "--a", "b"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        for before in ((), run)
    )
    assert plain.returncode == 3
    assert (managed.stdout, managed.returncode) == (plain.stdout, 3), managed.stderr
    assert managed.stderr.splitlines()[-1].startswith("belady: iteration 6 ")
    assert load(Run, report).trace.roots == ("Net",)
