"""What a user is told of iterations that are launched."""

from __future__ import annotations

import logging

from belady.graph.kinds import Kind
from belady.graph.prospect import Way
from belady.ir.timeline import Measured
from belady.units import format_bytes, format_seconds

_log = logging.getLogger("belady")

# How a report begins to say that they are.
NOTE = "forward and backward are captured and launched in one piece each (CUDA graphs)"

# How one begins to say that they might be, and are not.
ISSUED = "iterations are issued op by op, and not launched in one piece (CUDA graphs)"

# What is said of the memory of a step that takes more than a part of the budget.
_MATTERS = 0.04
_STEPPING = (
    "are left to the optimizer's step, which has no other memory where iterations are launched: "
    "torch.optim's SGD, Adam, AdamW and Adagrad take next to none of it with fused=True"
)


def said_of(kind: Kind, budget_bytes: int) -> list[str]:
    """What a user should know of a kind that is launched, or might be, one sentence each."""
    prospect = kind.prospect
    if kind.issued and prospect.why:
        return [f"{ISSUED}: {prospect.why}"]
    if prospect.way is not Way.LAUNCHED or kind.measured is None or prospect.instead is None:
        return []
    _, before = prospect.instead[-1]
    took = format_seconds(kind.measured.seconds), format_seconds(before.seconds)
    said = [f"{NOTE}: {took[0]} an iteration where issuing them took {took[1]}"]
    if matters(kind, budget_bytes) and not prospect.step.lent:
        said.append(f"{format_bytes(prospect.step.nbytes)} {_STEPPING}")
    return said


def gained_nothing(found: Measured, before: Measured, budget_bytes: int) -> str:
    """Why what was launched is not."""
    if found.allocation_retries:
        return "torch's allocator flushed its cache while they were launched"
    if found.reserved_bytes > budget_bytes:
        held, budget = format_bytes(found.reserved_bytes), format_bytes(budget_bytes)
        return f"launched they take {held}, more than the budget of {budget}"
    took = format_seconds(found.seconds), format_seconds(before.seconds)
    return f"launched they take {took[0]}, which is hardly less than {took[1]}, or more"


def matters(kind: Kind, budget_bytes: int) -> bool:
    """Whether what a step takes is more than a small part of the budget."""
    return kind.prospect.step.nbytes > _MATTERS * budget_bytes


def log_launched(found: Measured, before: Measured) -> None:
    """Say what launched iterations took, and those that were issued before."""
    _log.info(
        "launched in one piece an iteration takes %s, otherwise %s; %s reserved, %d flushes",
        format_seconds(found.seconds),
        format_seconds(before.seconds),
        format_bytes(found.reserved_bytes),
        found.allocation_retries,
    )
