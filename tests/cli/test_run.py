"""`belady run` and `belady profile`: what is the script's and what is ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from belady.errors import InfeasibleBudgetError, OutOfMemoryError, TierFullError
from belady.ir.files import load
from belady.ir.run import Run
from belady.ir.trace import Trace
from belady.virtual import Limits
from tests.cli.support import FakeMemory, a_run, belady

Script = Callable[..., str]

TRAIN = """
import sys, torch
net = torch.nn.Linear(3, 1)
print(sys.argv[1:])
for _ in range(4):
    net(torch.ones(2, 3)).sum().backward()
    print("step")
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
"""


def test_output_options_and_code_of_the_script_pass_through(
    memory: type[FakeMemory], script: Script
) -> None:
    result = belady("run", "--budget", "8GiB", script(TRAIN), "7", "--budget", "x", "--", "-m")
    assert result.exit_code == 7
    assert result.stdout == "['7', '--budget', 'x', '--', '-m']\n" + "step\n" * 4
    assert memory.made[0].limits == Limits(8 << 30)


def test_options_reach_the_memory(memory: type[FakeMemory], script: Script) -> None:
    belady(
        *("run", "--budget", "8GiB", "--policy", "vdnn_all", "--host-budget", "1GiB"),
        *("--disk-budget", "2GB", "--spill-dir", "/tmp", "--exact", "--engine", "graph"),
        script(TRAIN),
    )
    expected = Limits(8 << 30, 1 << 30, 2 * 10**9, "/tmp", "vdnn_all", True, "graph")
    assert memory.made[0].limits == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--engine", "eagre"), "'eagre' is not one of eager, graph"),
        (("--engine", "inductor", "--exact"), "can change bits"),
        (("--engine", "graph", "--policy", "ocdnn_opt"), "managed memory"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_the_script_runs(
    script: Script, options: tuple[str, ...], words: str
) -> None:
    result = belady("run", "--budget", "8GiB", *options, script("print('ran')"))
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", "").split())
    assert result.stdout == ""


def test_a_module_that_the_script_compiled_is_refused_by_the_engine_that_compiles(
    script: Script,
) -> None:
    compiled = TRAIN.replace("print(sys", "net.compile(); print(sys")
    result = belady("run", "--budget", "8GiB", "--engine", "graph", script(compiled))
    assert result.exit_code == 1
    assert result.stderr.startswith("belady: Linear is compiled already")
    assert "use engine='eager'" in result.stderr


def test_progress_goes_to_stderr_in_plain_lines(memory: type[FakeMemory], script: Script) -> None:
    result = belady("run", "--budget", "8GiB", script(TRAIN))
    expected = "belady: iteration 1 (steady): 500 ms, peak 3.00 GiB of 4.00 GiB, waited 250 ms"
    # When the phase changes, and the last one; then what there is to know.
    known = ["belady: no iteration was planned", "belady: not captured: something"]
    assert result.stderr.splitlines() == [expected, expected, *known]


def test_report(memory: type[FakeMemory], script: Script, tmp_path: Path) -> None:
    memory.run_document = replace(a_run(), notes=("half of it is not managed",))
    report = tmp_path / "run.json"
    result = belady("run", "--budget", "8GiB", "--report", report, script(TRAIN))
    assert result.exit_code == 0
    assert load(Run, report) == memory.run_document
    assert "belady: half of it is not managed" in result.stderr.splitlines()
    assert memory.made[0].recording


def test_nothing_to_report(memory: type[FakeMemory], script: Script, tmp_path: Path) -> None:
    report = tmp_path / "run.json"
    result = belady("run", "--budget", "8GiB", "--report", report, script(TRAIN))
    assert result.exit_code == 0
    assert not report.exists()
    assert "is not written" in result.stderr
    assert "not captured: something" in result.stderr


@pytest.mark.parametrize(
    ("verified", "options", "status", "code"),
    [
        (True, ("--verify",), "0", 0),
        (None, ("--verify",), "0", 0),
        (False, ("--verify",), "0", 4),
        (False, ("--verify",), "7", 7),
        (False, (), "0", 0),
    ],
)
def test_verify(
    memory: type[FakeMemory],
    script: Script,
    verified: bool | None,
    options: tuple[str, ...],
    status: str,
    code: int,
) -> None:
    memory.verified = verified
    result = belady("run", "--budget", "8GiB", *options, script(TRAIN), status)
    assert result.exit_code == code
    assert ("over the budget" in result.stderr) == (verified is False)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (
            InfeasibleBudgetError(
                needed_bytes=3, budget_bytes=1, smallest_bytes=2, op="conv", module="a"
            ),
            3,
        ),
        (OutOfMemoryError("the device is full"), 5),
        (TierFullError("the disk is full"), 5),
    ],
)
def test_what_belady_cannot_do(
    memory: type[FakeMemory], script: Script, error: Exception, code: int
) -> None:
    memory.error = error
    result = belady("run", "--budget", "8GiB", script(TRAIN))
    assert result.exit_code == code
    assert result.stderr.startswith(f"belady: {error}\n")
    assert "Traceback" not in result.stderr
    assert memory.made[0].closed == 1


def test_a_script_of_which_nothing_can_be_planned_is_told_why(script: Script) -> None:
    of_samples = """
        import torch
        from torch.func import functional_call, grad, vmap
        net = torch.nn.Linear(3, 1)
        weights = {name: it.detach() for name, it in net.named_parameters()}
        of_one = grad(lambda p, row: functional_call(net, p, (row,)).sum())
        for _ in range(4):
            vmap(of_one, (None, 0))(weights, torch.ones(2, 3))
        """
    result = belady("run", "--budget", "8GiB", script(of_samples))
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        "belady: no iteration was planned",
        "belady: calls of Linear inside a transform of torch.func (vmap, grad) run as plain "
        "PyTorch",
    ]


@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated")
@pytest.mark.parametrize("engine", ["eager", "graph", "auto"])
def test_a_module_of_torchscripts_is_left_alone_and_named(
    script: Script, tmp_path: Path, engine: str
) -> None:
    scripted = """
        import sys, torch
        net, head = torch.nn.Linear(3, 3), torch.jit.script(torch.nn.Linear(3, 1))
        for _ in range(6):
            x = torch.ones(2, 3)
            head(net(x) if len(sys.argv) > 1 else x).sum().backward()
            print("step")
        """
    said = "Linear runs as plain PyTorch, as TorchScript has compiled it"
    path, report = script(scripted), tmp_path / "run.json"
    options = ("run", "--budget", "8GiB", "--engine", engine, "--report", report, path)
    result = belady(*options)
    assert (result.exit_code, result.stdout) == (0, "step\n" * 6)
    assert result.stderr.splitlines() == ["belady: nothing was managed", f"belady: {said}"]
    result = belady(*options, "both")
    assert (result.exit_code, result.stdout) == (0, "step\n" * 6)
    assert result.stderr.splitlines()[-1] == f"belady: {said}"
    assert load(Run, report).notes[-1] == said


def test_a_script_that_trains_nothing(memory: type[FakeMemory], script: Script) -> None:
    result = belady("run", "--budget", "8GiB", "--verify", script("print('hello')"))
    assert result.exit_code == 0
    assert result.stdout == "hello\n"
    assert "nothing was managed" in result.stderr


def test_profile_writes_the_trace_and_ends_early(
    memory: type[FakeMemory], script: Script, tmp_path: Path
) -> None:
    memory.run_document = a_run()
    output = tmp_path / "trace.json"
    result = belady("profile", "-o", output, "--iterations", "3", script(TRAIN))
    assert result.exit_code == 0
    assert result.stdout.count("step") == 3  # printed after the call
    assert load(Trace, output) == a_run().trace
    assert memory.made[0].limits.policy == "hybrid"  # its traces say what can be replayed


def test_profile_can_be_of_another_engine(
    memory: type[FakeMemory], script: Script, tmp_path: Path
) -> None:
    memory.run_document = a_run()
    output = tmp_path / "trace.json"
    result = belady("profile", "-o", output, "--engine", "graph", script(TRAIN))
    assert result.exit_code == 0
    assert memory.made[0].limits.engine == "graph"
    assert belady("profile", "--engine", "steam", script(TRAIN)).exit_code == 2


def test_profile_of_nothing(memory: type[FakeMemory], script: Script, tmp_path: Path) -> None:
    output = tmp_path / "trace.json"
    result = belady("profile", "-o", output, script("pass"))
    assert result.exit_code == 1
    assert not output.exists()
