"""``belady demo``: train under a budget and see what happens."""

from __future__ import annotations

from typing import Annotated

import typer

from belady.cli.exits import UNVERIFIED
from belady.cli.machine import measured
from belady.cli.options import EngineOption
from belady.cli.show import show_line

# From the sixth on an iteration is neither watched nor counted.
_FEWEST = 6


def demo(
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="cpu, cuda, cuda:1, ...")
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="BYTES", help="Default: a tight one.")
    ] = None,
    iterations: Annotated[
        int, typer.Option("--iterations", min=_FEWEST, help="Training iterations, each way.")
    ] = 30,
    engine: EngineOption = "eager",
) -> None:
    """Train a small network plainly and under a budget, and compare.

    Exits with 4 if a bit differs or the peak is over the budget.
    """
    from belady.demo import demo as run_demo

    if engine == "inductor":
        raise typer.BadParameter("the kernels of 'inductor' have other bits than plain PyTorch's")
    measured(device, None)  # refuses a device that is not there
    result = run_demo(device, budget=budget, iterations=iterations, engine=engine, report=show_line)
    for line in ("", *result.report.splitlines(), "", *str(result).splitlines()):
        show_line(line)
    if not result.held:
        raise typer.Exit(UNVERIFIED)
