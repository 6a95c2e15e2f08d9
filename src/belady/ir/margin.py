"""What an op has to leave of a budget to torch's allocator.

A margin is for what is lost between blocks that come and go. After the last backward of an
iteration all that a plan moves or makes again is gone: what an optimizer's step takes then for a
while goes into the room of that, so a fraction is not asked of its ops. It is of a step in between.
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
    at_rest = _without_fraction(allocator).peak_within(budget_bytes)
    return [at_rest if still else moving for still in still_ops(trace)]


def needed(trace: Trace, allocator: Allocator, held: Sequence[int]) -> tuple[int, int]:
    """Smallest budget in which so many bytes during each op are safe, and the op that asks for it.

    Parameters
    ----------
    held
        Bytes for each op of ``trace``, allocator rounding included.
    """
    still = still_ops(trace)
    (moving, first), (at_rest, second) = (_peak(held, still, it) for it in (False, True))
    found = [(allocator.budget_for(moving), first)]
    if at_rest:
        found.append((_without_fraction(allocator).budget_for(at_rest), second))
    return max(found, key=lambda it: it[0])


def moving_peak(trace: Trace, held: Sequence[int]) -> int:
    """Most bytes during an op that a fraction is asked of."""
    return _peak(held, still_ops(trace), False)[0]


def still_ops(trace: Trace) -> list[bool]:
    """Of each op whether it is of an optimizer's step after the last backward."""
    over = max(trace.last_drops.values(), default=0)
    return [op.phase is Phase.OPTIMIZER and at >= over for at, op in enumerate(trace.ops)]


def _peak(held: Sequence[int], still: Sequence[bool], asked: bool) -> tuple[int, int]:
    """Most bytes during an op that is ``asked`` for, and the first such op."""
    ops = (at for at, it in enumerate(still) if it is asked)
    at = max(ops, key=held.__getitem__, default=None)
    return (0, 0) if at is None else (held[at], at)


def _without_fraction(allocator: Allocator) -> Allocator:
    return replace(allocator, margin_fraction=0.0)
