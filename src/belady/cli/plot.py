"""``belady plot``: a run as a figure for a paper."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from belady.cli.inputs import RunArgument, read
from belady.cli.outputs import require_output
from belady.cli.show import note
from belady.ir.run import Run


class Picture(StrEnum):
    """What can be drawn of one run."""

    MEMORY = "memory"
    TIMELINE = "timeline"


def _drawable(output: Path) -> Path:
    if output.suffix.lower() not in (".svg", ".png"):
        raise typer.BadParameter(f"{str(output)!r} ends in neither .svg nor .png")
    return output


def plot(
    picture: Annotated[
        Picture,
        typer.Argument(
            metavar="PICTURE", help="memory: bytes held by op; timeline: lanes by time."
        ),
    ],
    run: RunArgument,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Where the figure goes; it ends in .svg or .png.",
            callback=_drawable,
        ),
    ],
    columns: Annotated[
        int, typer.Option("--columns", min=1, max=2, help="Columns of a page that it fills.")
    ] = 1,
) -> None:
    """Draw PICTURE of RUN as SVG or PNG, for a paper. Needs matplotlib: belady[plot]."""
    from belady.report import plots

    require_output(output, run)
    draw = {Picture.MEMORY: plots.memory, Picture.TIMELINE: plots.timeline}[picture]
    plots.save_figure(draw(read(Run, run), columns=columns), output)
    note(f"{output}: {picture.value}")
