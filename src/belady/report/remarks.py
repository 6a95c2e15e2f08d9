"""What the reader of a report has to know besides: in text and page alike."""

from __future__ import annotations

from belady.ir.plan import Managed, Workspace
from belady.ir.run import Run
from belady.ir.trace import Source
from belady.units import format_seconds


def remarks(run: Run) -> list[str]:
    """All of it, a sentence each."""
    plan = run.plan
    found = []
    if plan.numerics:
        found.append(f"Can change a bit of the result: {', '.join(plan.numerics)}")
    if plan.workspace is Workspace.MEMORY:
        found.append(
            f"Convolutions run as they do with less workspace, {len(plan.layer_algorithms)} of "
            "them: one setting holds for the whole iteration, also where single ones are predicted "
            "to take more, and one algorithm for all calls of the same shapes"
        )
    if _has_hooks(run) and run.trace.is_host_bound:
        found.append(_busy_host(run))
    return found + [f"Note: {note}" for note in run.notes]


def _has_hooks(run: Run) -> bool:
    """Whether the eager engine does what graphs could do too, as far as is known."""
    decisions = run.plan.decisions.values()
    refused = any(isinstance(it, Managed) for it in decisions)
    refused |= any(note.startswith("engine='eager'") for note in run.notes)
    return bool(decisions) and not refused and run.trace.source is Source.EAGER


def _busy_host(run: Run) -> str:
    host = sum(op.host_seconds for op in run.trace.ops)
    device = sum(op.device_seconds for op in run.trace.ops)
    return (
        f"The host takes longer to issue the ops of this iteration ({format_seconds(host)}) than "
        f"the device to run them ({format_seconds(device)}), so what moves or is made again costs "
        "what it takes to issue it, by hooks in Python. Graphs have none: try engine='auto', which "
        "captures the model where it can be captured"
    )
