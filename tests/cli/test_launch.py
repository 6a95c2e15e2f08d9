"""Scripts run as python would run them, and their roots are found."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from belady.errors import InfeasibleBudgetError, StaleValueError
from belady.launch import Launched, LaunchOptions, run_script
from belady.virtual import Limits
from tests.cli.support import FakeMemory

Script = Callable[..., str]

PRELUDE = """
import sys, torch
from torch.utils.checkpoint import checkpoint

class Net(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)

    def forward(self, x, scale=1.0):
        return self.last(checkpoint(self.first, x, use_reentrant=False)) * scale

x = torch.ones(2, 3)
"""


def launch(
    path: str, *arguments: str, module: bool = False, iterations: int | None = None
) -> Launched:
    options = LaunchOptions(Limits(1 << 30), module=module, iterations=iterations)
    return run_script(path, arguments, options=options)


@pytest.mark.parametrize(
    ("ending", "code", "shown"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('out of luck')", 1, "out of luck\n"),
        ("sys.exit([1])", 1, "[1]\n"),
        ("raise SystemExit(True)", 1, ""),
    ],
)
def test_exit_codes_are_those_of_python(
    script: Script, capsys: pytest.CaptureFixture[str], ending: str, code: int, shown: str
) -> None:
    assert launch(script(f"import sys\n{ending}")).exit_code == code
    assert capsys.readouterr().err == shown


def test_uncaught_error_is_shown_without_our_frames(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script("def f():\n    raise ValueError('mine')\nf()")
    assert launch(path).exit_code == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == f'  File "{path}", line 3, in <module>'
    assert lines[-1] == "ValueError: mine"
    assert not [line for line in lines if "runpy" in line or "launch.py" in line]


def test_error_of_a_call_is_shown_without_our_frames(
    memory: type[FakeMemory], script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(
        PRELUDE
        + """
class Fails(Net):
    def forward(self, x):
        try:
            self.first(x.T)
        except RuntimeError as error:
            raise ValueError("mine") from error

Fails()(x)
"""
    )
    assert launch(path).exit_code == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "ValueError: mine"
    assert [line.split(", ")[-1] for line in lines if path in line] == [
        "in forward", "in <module>", "in forward",
    ]  # fmt: skip
    assert not [line for line in lines if "launch.py" in line]


def test_syntax_error_is_shown(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(script("def")).exit_code == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].strip().startswith("File")
    assert lines[-1].startswith("SyntaxError")


def test_interrupt(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(script("raise KeyboardInterrupt")).exit_code == 130
    assert "KeyboardInterrupt" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["pass", "sys.exit(3)", "raise ValueError"])
def test_threads_that_the_script_leaves_are_waited_for(
    memory: type[FakeMemory], script: Script, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    left = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
net = Net()
def train_again():
    time.sleep(0.2)
    net(x).sum().backward()
    print("end")
def train():
    time.sleep(0.2)
    again = threading.Thread(target=train_again)
    again.start()
threading.Thread(target=train).start()
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
# Python ends its threads, which nothing else does.
pool = ThreadPoolExecutor(1)
pool.submit(int).result()
"""
    launched = launch(script(PRELUDE + left + ending))
    assert launched.exit_code == {"pass": 0, "sys.exit(3)": 3}.get(ending, 1)
    assert capsys.readouterr().out == "end\n"
    (vm,) = memory.made
    assert len(vm.added) == 1


def test_script_sees_itself_as_main_and_all_is_put_back(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script("word = 'beside'", "neighbour.py")
    path = script("""
        import sys
        from neighbour import word
        print(__name__, sys.argv[0] == __file__, sys.argv[1:], sys.path[0], word)
        sys.argv.append("more")
        sys.path.append("/nowhere")
        sys.path = []
    """)
    before = sys.argv, list(sys.argv), sys.path, list(sys.path), sys.modules["__main__"]
    try:
        assert launch(path, "--lr", "1", "-x").exit_code == 0
    finally:
        sys.modules.pop("neighbour", None)
    assert capsys.readouterr().out == f"__main__ True ['--lr', '1', '-x'] {tmp_path} beside\n"
    after = sys.argv, list(sys.argv), sys.path, list(sys.path), sys.modules["__main__"]
    assert before == after
    assert before[0] is after[0]
    assert before[2] is after[2]


def test_what_the_script_is_called_is_absolute(
    script: Script,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = script("import sys; print(sys.argv[0], __file__); raise ValueError", "it.py")
    monkeypatch.chdir(tmp_path)
    assert launch("it.py").exit_code == 1
    out, err = capsys.readouterr()
    assert out == f"it.py {path}\n"
    assert f'File "{path}", line 1' in err


def test_module(
    script: Script,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "pack").mkdir()
    script("", "pack/__init__.py")
    path = script("import sys; print(__name__, sys.argv, __package__); sys.exit(4)", "pack/it.py")
    monkeypatch.chdir(tmp_path)
    try:
        assert launch("pack.it", "--a", module=True).exit_code == 4
    finally:
        sys.modules.pop("pack", None)
    assert capsys.readouterr().out == f"__main__ {[path, '--a']} pack\n"


@pytest.mark.parametrize("name", ["no_such_module", "os.no_such", "", ".it"])
def test_missing_module(name: str) -> None:
    with pytest.raises(FileNotFoundError):
        launch(name, module=True)


def test_missing_script(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        launch(str(tmp_path / "none.py"))


def test_folder_with_main(script: Script, tmp_path: Path) -> None:
    script("import sys; sys.exit(3)", "__main__.py")
    assert launch(str(tmp_path)).exit_code == 3


def test_roots_are_found_once(memory: type[FakeMemory], script: Script) -> None:
    launched = launch(
        script(
            PRELUDE
            + """
net, loss = Net(), torch.nn.MSELoss()
with torch.no_grad():
    Net()(x)                        # no graph: not a root
torch.nn.ReLU()(x)                  # nothing to train, no gradient asked
for _ in range(2):
    y = net(x, scale=torch.ones(1))
    loss(y, target=torch.zeros(2, 1)).backward()   # replays net.first inside backward
"""
        )
    )
    assert launched.exit_code == 0
    (vm,) = memory.made
    assert launched.vm is vm
    assert vm.limits == Limits(1 << 30)
    assert [type(root).__name__ for root in vm.added] == ["Net", "MSELoss"]
    assert vm.closed == 1


def test_nothing_is_left_behind(memory: type[FakeMemory], script: Script) -> None:
    net, before = torch.nn.Linear(1, 1), dict(vars(torch.nn.Module))
    sys.modules["shared_net"] = net  # type: ignore[assignment]
    try:
        launch(script("import torch, shared_net\nshared_net(torch.ones(1))"))
    finally:
        del sys.modules["shared_net"]
    assert dict(vars(torch.nn.Module)) == before
    assert memory.made[0].added == [net]


def test_roots_are_found_after_calls_that_failed(memory: type[FakeMemory], script: Script) -> None:
    launch(
        script(
            PRELUDE
            + """
class Fails(Net):
    error = None
    def forward(self, x):
        if self.error is not None:
            raise self.error
        return super().forward(x)

class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Fails()
    def forward(self, x):
        return self.inner(x)

outer = Outer()
for error in (ValueError(), KeyboardInterrupt(), None):
    outer.inner.error = error
    try:
        outer(x)
    except BaseException:
        pass
Net()(x)
"""
        )
    )
    assert [type(root).__name__ for root in memory.made[0].added] == ["Outer", "Net"]


def test_compiled_module_is_a_root_and_is_captured_whole(
    memory: type[FakeMemory], script: Script
) -> None:
    launched = launch(
        script(
            PRELUDE
            + """
net = torch.compile(Net(), backend="eager", fullgraph=True)
for _ in range(2):
    net(x, scale=2.0).sum().backward()
"""
        )
    )
    assert launched.exit_code == 0
    assert [type(root).__name__ for root in memory.made[0].added] == ["OptimizedModule"]


def test_no_root_no_memory(memory: type[FakeMemory], script: Script) -> None:
    assert launch(script("import torch")).vm is None
    assert memory.made[0].closed == 1


def test_ends_after_enough_iterations(
    memory: type[FakeMemory], script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(
        PRELUDE
        + """
net = Net()
try:
    while True:
        print("step")
        net(x)
finally:
    print("cleaned up")
"""
    )
    launched = launch(path, iterations=2)
    assert launched.exit_code == 0
    assert capsys.readouterr().out == "step\nstep\nstep\ncleaned up\n"
    assert memory.made[0].closed == 1


def test_what_belady_cannot_do_comes_out(memory: type[FakeMemory], script: Script) -> None:
    memory.error = InfeasibleBudgetError(
        needed_bytes=3, budget_bytes=1, smallest_bytes=2, op="conv", module="a"
    )
    plain_call = torch.nn.Module.__call__
    with pytest.raises(InfeasibleBudgetError):
        launch(script(PRELUDE + "Net()(x)"))
    assert memory.made[0].closed == 1
    assert torch.nn.Module.__call__ is plain_call


def test_what_the_script_did_wrong_is_shown_as_its_error(
    memory: type[FakeMemory], script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    memory.error = StaleValueError("changed in place")
    path = script(PRELUDE + "Net()(x)")
    assert launch(path).exit_code == 1
    assert f'File "{path}"' in capsys.readouterr().err
