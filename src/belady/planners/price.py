"""What a plan counts as whose blocks may not fit into one another: slower, as they lack more."""

from __future__ import annotations

# Powers of what is needed: of a mix to begin the next one from, which may lead to some that fit,
# and of a plan to keep.
BEGUN, KEPT = 1, 4


def price(seconds: float, excess: float, power: int) -> float:
    """Seconds of a plan, and more where its blocks need more than the budget.

    Parameters
    ----------
    excess
        See `belady.simulate.blocks.excess`.
    power
        `BEGUN` or `KEPT`.
    """
    return seconds * (1 + max(0.0, excess)) ** power
