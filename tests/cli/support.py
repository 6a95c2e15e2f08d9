"""Running the command, and a stand-in for what manages a script's memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from typer.testing import CliRunner, Result

import belady as belady_package
from belady.cli import app
from belady.ir.files import save
from belady.ir.hardware import Allocator, HardwareProfile
from belady.ir.plan import Budget, Plan
from belady.ir.run import Run
from belady.ir.timeline import Timeline
from belady.ir.trace import Trace
from tests.support.builder import OpSpec, build_trace
from tests.support.strategies import machine


def belady(*arguments: object) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def child() -> dict[str, str]:
    """Environment in which a child process finds belady, installed or not."""
    source = str(Path(belady_package.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": source, "NO_COLOR": "1"}


def gpu_trace() -> Trace:
    return build_trace([OpSpec(nbytes=1 << 20, device_us=400, workspace_bytes=1 << 16)] * 12)


def gpu() -> HardwareProfile:
    allocator = Allocator(round_bytes=512, margin_fraction=0.0, margin_bytes=0)
    return machine("cuda", link_rate=5e10, disk=False, disk_rate=1e9, allocator=allocator)


def documents(folder: Path) -> tuple[Path, Path]:
    """Files with a trace and with the machine that it is for."""
    save(gpu_trace(), folder / "trace.json")
    save(gpu(), folder / "hardware.json")
    return folder / "trace.json", folder / "hardware.json"


def a_run() -> Run:
    trace = gpu_trace()
    plan = Plan(trace=trace.fingerprint, planner="baseline/1", budget=Budget(1 << 30))
    return Run(trace, gpu(), plan, Timeline(1.0, 1.0, (), 0))


@dataclass(frozen=True)
class Stats:
    index: int
    seconds: float = 0.5
    peak_bytes: int = 3 << 30
    budget_bytes: int = 4 << 30
    stall_seconds: float = 0.25
    phase: str = "steady"


class FakeMemory:
    """Stands in for `belady.virtual.VirtualMemory`; every root call is an iteration."""

    made: ClassVar[list[FakeMemory]]
    run_document: Run | None = None
    error: BaseException | None = None
    verified: bool | None = None

    def __init__(self, models: list[Any], limits: Any) -> None:
        self.limits = limits
        self.added: list[Any] = []
        self.listeners: list[Callable[[Any], None]] = []
        self.closed = 0
        self.recording = False
        self._handles: list[Any] = []
        self._untold = False
        type(self).made.append(self)

    def add(self, module: Any) -> None:
        self.added.append(module)
        if self.error is not None:
            raise self.error
        self._handles.append(module.register_forward_hook(self._iteration))

    def _iteration(self, *_: Any) -> None:
        # Of each is told when the next has ended.
        self._tell()
        self._untold = True

    def _tell(self) -> None:
        told, self._untold = self._untold, False
        for listener in self.listeners if told else ():
            listener(Stats(len(self.added)))

    def record(self) -> None:
        self.recording = True

    def run(self) -> Run | None:
        return self.run_document

    def report(self) -> str:
        return "no iteration has been planned yet\nnot captured: something\n"

    def close(self) -> None:
        self._tell()
        self.closed += 1
        for handle in self._handles:
            handle.remove()
