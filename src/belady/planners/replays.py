"""Which ops to run again for a value, so that as little as possible is computed twice."""

from __future__ import annotations

from collections.abc import Callable

from belady.ir.plan import Recompute
from belady.ir.replay import closure
from belady.ir.trace import Trace

# From where a block of a ResNet begins to where it ends, with what a compiler casts in between. A
# longer replay is no longer cheap.
LONGEST = 16


def _every_value(_: int) -> bool:
    return True


def cheapest(
    trace: Trace, index: int, usable: Callable[[int], bool] = _every_value
) -> Recompute | None:
    """Least that must run again to have value ``index`` back, or None if no short replay may.

    Parameters
    ----------
    usable
        Whether a replay may start from a saved value; by default from every one, which is legal
        where all other values are kept.
    """
    return closure(trace, index, usable, LONGEST)
