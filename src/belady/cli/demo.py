"""``belady demo``: train under a budget and see what happens."""

from __future__ import annotations

from typing import Annotated

import typer

from belady.cli.show import show_line


def demo(
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="cpu, cuda, cuda:1, ...")
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="BYTES", help="Default: a tight one.")
    ] = None,
    iterations: Annotated[
        int, typer.Option("--iterations", min=1, help="Training iterations, each way.")
    ] = 20,
) -> None:
    """Train a small network plainly and under a budget, and compare."""
    from belady.demo import demo as run_demo

    result = run_demo(device=device, budget=budget, iterations=iterations, report=show_line)
    show_line(str(result))
