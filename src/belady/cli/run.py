"""``belady run``: run an unmodified script within a budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from belady.cli.exits import UNVERIFIED
from belady.cli.options import (
    BudgetOption,
    DiskBudgetOption,
    EngineOption,
    HostBudgetOption,
    ModuleOption,
    PolicyOption,
    ScriptArgument,
    SpillDirOption,
    bytes_of,
    script_file,
)
from belady.cli.outputs import require_output
from belady.cli.progress import Progress
from belady.cli.show import note
from belady.errors import BeladyError
from belady.ir.files import save
from belady.units import parse_bytes

if TYPE_CHECKING:
    from belady.launch import Launched


def run(
    command: ScriptArgument,
    budget: BudgetOption,
    policy: PolicyOption = "auto",
    engine: EngineOption = "eager",
    host_budget: HostBudgetOption = None,
    disk_budget: DiskBudgetOption = None,
    spill_dir: SpillDirOption = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write the run there as JSON.")
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Take no decision that can change a bit.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Exit with 4 if the measured peak is over budget.")
    ] = False,
    module: ModuleOption = False,
) -> None:
    """Run SCRIPT, which needs to know nothing of belady, within a budget.

    Options after SCRIPT belong to the script, and so do its output and its exit code.
    """
    from belady.eager.limits import Limits
    from belady.launch import LaunchOptions, run_script

    require_output(report, *script_file(command, module))
    written = report and report.absolute()  # the script may go to another folder
    limits = Limits(
        budget=parse_bytes(budget, "--budget"),
        host_budget=bytes_of(host_budget, "--host-budget"),
        disk_budget=bytes_of(disk_budget, "--disk-budget"),
        spill_dir=spill_dir,
        policy=policy,
        exact=exact,
        engine=engine,
    )
    options = LaunchOptions(limits, module=module, recorded=report is not None)
    with Progress() as progress:
        try:
            launched = run_script(command[0], command[1:], options=options, progress=progress)
        except BeladyError:
            raise
        except ValueError as error:  # options that do not go together; a script's are shown
            raise typer.BadParameter(str(error)) from error
    _write(launched, written)
    raise typer.Exit(_exit_code(launched, verify))


def _write(launched: Launched, report: Path | None) -> None:
    if launched.vm is None:
        seen = "" if launched.unmanaged else "no training iteration was seen: "
        said: tuple[str, ...] = (f"{seen}nothing was managed", *launched.unmanaged)
    elif (found := launched.vm.run()) is None:
        unwritten = f": {report} is not written" if report else ""
        # The first line of the report says the same, and the others why.
        known = launched.vm.report().splitlines()[1:]
        said = (f"no iteration was planned{unwritten}", *known, *launched.unmanaged)
    else:
        document = replace(found, notes=(*found.notes, *launched.unmanaged))
        if report is not None:
            save(document, report)
        said = document.notes
    for line in said:
        note(line)


def _exit_code(launched: Launched, verify: bool) -> int:
    if launched.vm is None or launched.vm.verified is not False:
        return launched.exit_code
    note("the measured peak is over the budget: see the report")
    return launched.exit_code or (UNVERIFIED if verify else 0)
