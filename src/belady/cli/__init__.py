"""The command ``belady``: one file a verb, no logic beyond reading options and printing."""

from __future__ import annotations

from typing import Annotated

import typer

from belady._version import __version__
from belady.cli import demo, doctor, explain, plan, plot, profile, report, run, simulate, trace
from belady.cli.exits import Guarded
from belady.cli.show import show_line

# Options after SCRIPT belong to the script.
_SCRIPT = {"allow_interspersed_args": False}

app = typer.Typer(
    name="belady",
    cls=Guarded,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("doctor")(doctor.doctor)
app.command("profile", context_settings=_SCRIPT)(profile.profile)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)
app.command("run", context_settings=_SCRIPT)(run.run)
app.command("report")(report.report)
app.command("explain")(explain.explain)
app.command("trace")(trace.trace)
app.command("plot")(plot.plot)
app.command("demo")(demo.demo)


def _show_version(wanted: bool) -> None:
    if wanted:
        show_line(f"belady {__version__}")
        raise typer.Exit


@app.callback()
def _belady(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Train a network that does not fit in device memory, with the same results."""


def main() -> None:
    """Run the command with the arguments of this process, and exit."""
    app()
