"""Running the command, and a stand-in for what manages a script's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from belady.cli import app
from belady.ir.files import save
from belady.ir.hardware import Allocator, HardwareProfile
from belady.ir.plan import Plan
from belady.ir.run import Run
from belady.ir.timeline import Timeline
from belady.ir.trace import Trace
from tests.support.builder import OpSpec, build_trace
from tests.support.strategies import machine


def belady(*arguments: object) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


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
    plan = Plan(trace=trace.fingerprint, planner="baseline/1", budget=_budget())
    return Run(trace, gpu(), plan, Timeline(1.0, 1.0, (), 0))


def _budget() -> Any:
    from belady.ir.plan import Budget

    return Budget(1 << 30)


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

    made: list[FakeMemory]
    run_document: Run | None = None
    on_add: Callable[[], None] | None = None
    verified: bool | None = None

    def __init__(self, models: list[Any], **options: Any) -> None:
        self.options = options
        self.added: list[tuple[Any, tuple[Any, ...], Mapping[str, Any]]] = []
        self.listeners: list[Callable[[Any], None]] = []
        self.closed = 0
        type(self).made.append(self)

    def add(self, module: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> None:
        self.added.append((module, args, kwargs))
        if type(self).on_add is not None:
            type(self).on_add()
        module.register_forward_hook(self._iteration)

    def _iteration(self, *_: Any) -> None:
        for listener in self.listeners:
            listener(Stats(len(self.added)))

    def run(self) -> Run | None:
        return type(self).run_document

    def close(self) -> None:
        self.closed += 1
