"""How fast this machine is now, for limits of time that are stated for a machine of its own."""

from __future__ import annotations

import time

# What the piece of work takes on a core of a server (AMD EPYC) that nobody else uses.
_PACE_S = 0.15


def pace() -> float:
    """Processor seconds of a fixed piece of work like a planner's; more beside neighbours."""
    start = time.process_time()
    found: dict[int, tuple[int, int]] = {}
    for number in range(600_000):
        before = found.get(number & 4095, (0, 0))
        found[number & 4095] = (number, max(before[0], number & 255))
    assert len(found) == 4096
    return time.process_time() - start


def slower(before: float) -> float:
    """How many times as long as there things take here, at least 1.

    Parameters
    ----------
    before
        What `pace` took before what is timed; it is asked again now.
    """
    return max(1.0, (before + pace()) / 2 / _PACE_S)
