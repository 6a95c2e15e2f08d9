"""``belady plan``: decide for a trace under a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from belady.cli.inputs import read
from belady.cli.machine import hardware_for
from belady.cli.options import (
    BudgetOption,
    DiskBudgetOption,
    HardwareOption,
    HostBudgetOption,
    JsonOption,
    PolicyOption,
    TraceArgument,
    bytes_of,
)
from belady.cli.outputs import require_output
from belady.cli.show import show_document, show_table
from belady.ir.files import save
from belady.ir.plan import Budget, Offload, Plan
from belady.ir.trace import Trace
from belady.units import format_bytes, format_seconds, parse_bytes


def plan(
    trace: TraceArgument,
    budget: BudgetOption,
    policy: PolicyOption = "auto",
    hardware: HardwareOption = None,
    host_budget: HostBudgetOption = None,
    disk_budget: DiskBudgetOption = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the plan there.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Plan what happens to every value of TRACE under a budget."""
    from belady import planners

    limits = Budget(
        parse_bytes(budget, "--budget"),
        bytes_of(host_budget, "--host-budget"),
        bytes_of(disk_budget, "--disk-budget"),
    )
    require_output(output, trace, hardware)
    document = read(Trace, trace)
    made = planners.plan(policy, document, hardware_for(document.device, hardware), limits)
    if output is not None:
        save(made, output)
    if json:
        show_document(made)
    else:
        show_table(f"Plan by {made.planner}", ("what", "value"), _rows(document, made))


def _rows(trace: Trace, made: Plan) -> Iterator[tuple[str, str]]:
    yield "budget", format_bytes(made.budget.device_bytes)
    yield "predicted peak", format_bytes(made.predicted_peak_bytes)
    yield "predicted time", format_seconds(made.predicted_seconds)
    counts: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for value in trace.saved:
        decision = made.decisions.get(value)
        name = type(decision).__name__.lower() if decision else "keep"
        if isinstance(decision, Offload):
            name = f"{name} to {decision.tier.value}"
        counts[name] += 1
        nbytes[name] += trace.storages[trace.values[value].storage].nbytes
    for name, count in counts.most_common():
        yield name, f"{count} values, {format_bytes(nbytes[name])}"
    for name in made.numerics:
        yield "can change a bit", name
