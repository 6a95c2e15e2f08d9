"""``belady report``: a run as one page of HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from belady.cli.runs import RunArgument, load_run
from belady.cli.show import note
from belady.ir.files import uncollected, write


def report(
    run: RunArgument,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Where the page goes.")
    ] = Path("report.html"),
) -> None:
    """Write RUN as one page of HTML that needs nothing else: does it fit, what moved and why."""
    from belady.report.html import page

    if output.exists() and output.samefile(run):
        raise typer.BadParameter(f"{output} is the run itself: give -o another name")
    with uncollected():
        write(page(load_run(run)).encode("utf-8"), output)
    note(f"{output}: open it in a browser")
