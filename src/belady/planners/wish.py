"""What a mix of copies, replays and encodings should be like, and which values it sends away."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from belady.ir.plan import Encode, Offload, Recompute

# Exchanges: how many neighbours are turned at once, and how often a limit is changed instead.
_TURNED, _LIMITS = (1, 1, 1, 2, 4, 8, 16), 0.2


@dataclass(frozen=True, slots=True)
class Away:
    """Values that leave the device, by copies or to be computed again, or that are encoded."""

    moves: Mapping[int, Offload]
    replays: Mapping[int, Recompute]
    encoded: Mapping[int, Encode]


@dataclass(frozen=True, slots=True)
class Wish:
    """What a mix should be like.

    Attributes
    ----------
    values
        To be recomputed or encoded rather than copied, unless they stay.
    stretch
        Most that a replay may cost, in multiples of what it costs when all else is kept. One that
        would start from what is recomputed too gets longer.
    reserve
        Bytes for copies under way rather than for kept values, in multiples of the largest value.
        Where that is infinite nothing stays before copies have all the room that they can use.
    reach
        Most ops between a replay and the last of the first reads of all that is made again for it:
        of a recomputed value that it starts from, of what that one starts from. These are back that
        much earlier; where it would be more, ops run twice.
    copies_first
        Whether room is given to copies under way before anything that is recomputed stays.
    spare
        Part of the budget that is left, so that blocks fit into one another.
    encodes
        Whether those are encoded that lose less time so for each byte than by a replay.
    encoded, plain
        Those of ``values`` that are not to be recomputed in any case, or not to be encoded.
    """

    values: frozenset[int]
    stretch: float = inf
    reserve: float = 0.0
    reach: float = 0.0
    copies_first: bool = False
    spare: float = 0.0
    encodes: bool = True
    encoded: frozenset[int] = frozenset()
    plain: frozenset[int] = frozenset()


def neighbour(
    rng: random.Random, at: Wish, order: Sequence[int], limits: Mapping[str, Sequence[Any]]
) -> Wish:
    """A mix like ``at`` but for a few values next to one another, or for one of its limits."""
    if rng.random() < _LIMITS:
        name = rng.choice(sorted(limits))
        return with_limit(at, name, rng.choice(limits[name]))
    first = rng.randrange(len(order))
    return replace(at, values=at.values ^ frozenset(order[first : first + rng.choice(_TURNED)]))


def with_limit(at: Wish, name: str, limit: Any) -> Wish:
    """A mix like ``at`` but for this limit."""
    return replace(at, **{name: limit})
