"""What a mix of copies, replays and encodings should be like, and which values it sends away."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from belady.ir.plan import Encode, Offload, Recompute
from belady.ir.trace import Trace

# Exchanges: how many values are turned at once, how often a limit is changed instead, and how often
# values alike, as one of each block of a model is, rather than those next to one another.
_TURNED, _LIMITS, _ALIKE = (1, 1, 1, 2, 4, 8, 16), 0.2, 0.5


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
    early
        Most ops by which a replay comes early, to where another one runs most of the same ops.
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
    early: float = 0.0
    copies_first: bool = False
    spare: float = 0.0
    encodes: bool = True
    encoded: frozenset[int] = frozenset()
    plain: frozenset[int] = frozenset()


class Neighbours:
    """Mixes like another one but for a few values, or for one of its limits.

    Parameters
    ----------
    values
        What may be recomputed or encoded.
    limits
        Choices for each limit.
    """

    def __init__(
        self, trace: Trace, values: Iterable[int], limits: Mapping[str, Sequence[Any]]
    ) -> None:
        self._limits = limits
        self._order = sorted(values, key=lambda v: (trace.values[v].first_save, v))
        kinds: dict[tuple[str, int], list[int]] = {}
        self._alike: dict[int, list[int]] = {}
        for value in self._order:
            it = trace.values[value]
            kind = trace.ops[it.producer].name, trace.storages[it.storage].nbytes
            self._alike[value] = kinds.setdefault(kind, [])
            self._alike[value].append(value)

    def one(self, rng: random.Random, at: Wish) -> Wish:
        """One of them; values that are turned are all turned as the first of them is."""
        if rng.random() < _LIMITS:
            name = rng.choice(sorted(self._limits))
            return with_limit(at, name, rng.choice(self._limits[name]))
        first = rng.choice(self._order)
        among = self._alike[first] if rng.random() < _ALIKE else self._order
        begin = among.index(first)
        turned = frozenset(among[begin : begin + rng.choice(_TURNED)])
        return replace(at, values=at.values - turned if first in at.values else at.values | turned)


def with_limit(at: Wish, name: str, limit: Any) -> Wish:
    """A mix like ``at`` but for this limit."""
    return replace(at, **{name: limit})
