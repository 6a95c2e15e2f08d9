"""``belady profile``: see what an iteration of a script does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from belady.cli.exits import FAILED
from belady.cli.options import (
    NO_LIMIT,
    EngineOption,
    ModuleOption,
    ScriptArgument,
    SpillDirOption,
    script_file,
)
from belady.cli.outputs import require_output
from belady.cli.progress import Progress
from belady.cli.show import note
from belady.ir.files import save

_ENOUGH = 3


def profile(
    command: ScriptArgument,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Where the trace goes.")
    ] = Path("trace.json"),
    iterations: Annotated[
        int, typer.Option("--iterations", min=_ENOUGH, help="Training iterations to run.")
    ] = _ENOUGH,
    engine: EngineOption = "eager",
    spill_dir: SpillDirOption = None,
    module: ModuleOption = False,
) -> None:
    """Run a few iterations of SCRIPT without a budget and write the trace of one.

    Options after SCRIPT belong to the script.
    """
    from belady.eager.limits import Limits
    from belady.launch import LaunchOptions, run_script

    require_output(output, *script_file(command, module))
    written = output.absolute()  # the script may go to another folder
    limits = Limits(budget=NO_LIMIT, spill_dir=spill_dir, policy="hybrid", engine=engine)
    options = LaunchOptions(limits, module=module, iterations=iterations)
    with Progress() as progress:
        launched = run_script(command[0], command[1:], options=options, progress=progress)
    observed = launched.vm.run() if launched.vm is not None else None
    if observed is None:
        note(f"{command[0]} ended before a training iteration was seen: no trace")
        raise typer.Exit(launched.exit_code or FAILED)
    save(observed.trace, written)
    note(f"{len(observed.trace.ops)} ops, {len(observed.trace.saved)} saved values: {output}")
    raise typer.Exit(launched.exit_code)
