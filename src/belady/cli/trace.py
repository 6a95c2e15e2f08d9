"""``belady trace``: a run as a timeline for Perfetto."""

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


def trace(
    run: RunArgument,
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Where the timeline goes (.json[.gz])."
        ),
    ],
    merge: Annotated[
        Path | None,
        typer.Option("--merge", metavar="FILE", help="A trace of torch.profiler to draw beside."),
    ] = None,
    merge_at: Annotated[
        int | None,
        typer.Option(
            "--merge-at",
            metavar="STEP",
            min=0,
            help="The iteration begins with ProfilerStep#STEP of --merge; default: the first.",
        ),
    ] = None,
) -> None:
    """Write RUN as Chrome trace JSON, which ui.perfetto.dev opens: lanes, stalls, bytes held."""
    from belady.report.chrome import chrome_trace
    from belady.report.merge import read_profile

    if merge is None and merge_at is not None:
        raise typer.BadParameter("--merge-at is a step of --merge, which is not given")
    require_output(output, run, merge)
    with uncollected():
        document = read(Run, run)
        profile = None if merge is None else read_profile(merge)
        write(chrome_trace(document, profile, merge_at), output)
    note(f"{output}: open it at https://ui.perfetto.dev")
