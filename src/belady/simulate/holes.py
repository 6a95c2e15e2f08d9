"""What memory in one piece is divided into, so that less of it is lost between a plan's blocks.

Best fit puts a block into the smallest hole that holds it. Where one hole is all of the memory,
blocks of every size come to lie side by side, in the order in which they are asked for, and those
that go leave holes too small for what comes. Walls that a piece begins with keep parts of it for
what fits in between. Which do is as hard to say as where blocks lie, but quickly simulated: some
are drawn at random, and those in which a plan ends lowest are the ones to take.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from belady.simulate.stretch import SMALL, Event, end_of
from belady.units import format_bytes

# Holes are of the sizes of larger blocks.
_LEAST = 8 << 20
# Most holes, and how many blocks side by side each holds.
_HOLES, _ROW = 4, (1, 1, 1, 2, 3)
# Divisions that are simulated: as many as have so many blocks in all.
_EVENTS, _FEWEST, _MOST = 1_000_000, 16, 400

# Bytes of each hole that a piece begins with; the rest lies behind the last wall.
Holes = tuple[int, ...]


def divisions(events: Sequence[Event], wall: int, count: int) -> list[Holes]:
    """Bytes of the holes that a piece may begin with: of the best so many, the best first.

    Parameters
    ----------
    events
        Blocks that come and go, in order.
    wall
        Bytes that stay taken behind each hole.
    """
    sizes = sorted({nbytes for _, nbytes in events if nbytes >= _LEAST})
    draws = max(_FEWEST, min(_MOST, _EVENTS // max(1, len(events)))) if sizes else 0
    rng, found = random.Random(0), dict[Holes, int]()
    found[()] = end_of(events, SMALL)
    for _ in range(draws):
        holes = _drawn(rng, sizes)
        if holes not in found:
            found[holes] = end_of(events, SMALL, holes, wall)
    # Of equals the one with the fewest walls.
    return sorted(found, key=lambda holes: (found[holes], len(holes)))[:count]


def told(holes: Holes) -> str:
    """How a log says what a piece begins with."""
    return " and ".join([*map(format_bytes, holes), "the rest"])


def _drawn(rng: random.Random, sizes: Sequence[int]) -> Holes:
    return tuple(rng.choice(sizes) * rng.choice(_ROW) for _ in range(rng.randint(1, _HOLES)))
