"""``belady report``: a run as one page of HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from belady.cli.inputs import RunArgument, read
from belady.cli.outputs import require_output
from belady.cli.show import note
from belady.ir.collector import uncollected
from belady.ir.files import write
from belady.ir.run import Run


def report(
    run: RunArgument,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Where the page goes.")
    ] = Path("report.html"),
) -> None:
    """Write RUN as one page of HTML that needs nothing else: does it fit, what moved and why."""
    from belady.report.html import page

    require_output(output, run)
    with uncollected():
        write(page(read(Run, run)).encode("utf-8"), output)
    note(f"{output}: open it in a browser")
