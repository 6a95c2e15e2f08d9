"""What an op has to leave of a budget to torch's allocator.

A margin is for what is lost between blocks that come and go. An optimizer's step begins when all
that a plan moves or makes again is gone: what it takes for a while goes into the room of that, so a
fraction is not asked of its ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from belady.ir.hardware import Allocator
from belady.ir.ops import Phase
from belady.ir.trace import Trace


def rooms(trace: Trace, allocator: Allocator, budget_bytes: int) -> list[int]:
    """Most bytes that are safe during each op within a budget; may be negative."""
    moving = allocator.peak_within(budget_bytes)
    still = _still(allocator).peak_within(budget_bytes)
    return [still if op.phase is Phase.OPTIMIZER else moving for op in trace.ops]


def needed(trace: Trace, allocator: Allocator, held: Sequence[int]) -> tuple[int, int]:
    """Smallest budget in which so many bytes during each op are safe, and the op that asks for it.

    Parameters
    ----------
    held
        Bytes for each op of ``trace``, allocator rounding included.
    """
    (moving, first), (still, second) = (_peak(trace, held, it) for it in (False, True))
    found = [(allocator.budget_for(moving), first)]
    if still:
        found.append((_still(allocator).budget_for(still), second))
    return max(found, key=lambda it: it[0])


def moving_peak(trace: Trace, held: Sequence[int]) -> int:
    """Most bytes during an op that a fraction is asked of."""
    return _peak(trace, held, False)[0]


def _peak(trace: Trace, held: Sequence[int], still: bool) -> tuple[int, int]:
    """Most bytes during an op of an optimizer's step, or outside of any, and the first such op."""
    ops = (at for at, op in enumerate(trace.ops) if (op.phase is Phase.OPTIMIZER) is still)
    at = max(ops, key=held.__getitem__, default=None)
    return (0, 0) if at is None else (held[at], at)


def _still(allocator: Allocator) -> Allocator:
    return replace(allocator, margin_fraction=0.0)
