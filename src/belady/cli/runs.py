"""The run that a verb draws."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from belady.errors import DocumentError, PlanMismatchError
from belady.ir.files import load
from belady.ir.run import Run

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="What `belady run --report` wrote.")
]


def load_run(path: Path) -> Run:
    """Read a run, and say where one comes from when the file holds something else."""
    try:
        return load(Run, path)
    except (DocumentError, PlanMismatchError) as error:
        hint = "a run is what `belady run --report FILE` writes"
        raise type(error)(f"{path}: {error}; {hint}") from error
