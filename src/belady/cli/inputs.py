"""The documents that verbs read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import typer

from belady.errors import DocumentError, PlanMismatchError
from belady.ir.files import load
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Plan
from belady.ir.run import Run
from belady.ir.trace import Trace

_Document = TypeVar("_Document", Trace, HardwareProfile, Plan, Run)

_WRITERS = {
    Trace: "a trace is what `belady profile -o FILE` writes",
    HardwareProfile: "a machine is what `belady doctor --json` prints",
    Plan: "a plan is what `belady plan -o FILE` writes",
    Run: "a run is what `belady run --report FILE` writes",
}

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="What `belady run --report` wrote.")
]


def read(kind: type[_Document], path: Path) -> _Document:
    """Read a document, and say where one comes from when the file holds something else."""
    try:
        return load(kind, path)
    except (DocumentError, PlanMismatchError) as error:
        raise type(error)(f"{path}: {error}; {_WRITERS[kind]}") from error
