"""What counting bytes and waits costs: iterations under one settled plan, at two levels in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import belady
from belady.measure.progress import Progress
from benchmarks.cases import Record

# Rows of each level, iterations of each, and seconds that they may take together.
_TURNS, _ROW, _MOST_S = 3, 10, 20.0


def in_turn(vm: belady.VirtualMemory, iterate: Callable[[int], object]) -> Record:
    """Seconds of an iteration, of rows at level 0 and at level 1 in turn; none where they are long.

    Of iterations that are issued, under a plan that stays: of launches nobody counts more. After
    all that is told of these, since it may be verified anew meanwhile.

    Parameters
    ----------
    iterate
        Runs so many iterations and waits for the last.
    """
    before = vm.run()
    if before is None or before.measured is None or before.measured.launched:
        return {}
    begun = time.perf_counter()
    iterate(1)
    if 2 * _TURNS * (_ROW + 1) * (time.perf_counter() - begun) > _MOST_S:
        return {}
    rows: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(_TURNS):
        for level, found in rows.items():
            with _at_least(level):
                # What follows another level may have something left of it.
                iterate(1)
                begun = time.perf_counter()
                iterate(_ROW)
                found.append((time.perf_counter() - begun) / _ROW)
    after = vm.run()
    if after is None or (after.plan, after.measured) != (before.plan, before.measured):
        # It was verified meanwhile, or planned anew.
        return {}
    return {"level_rows": {str(level): found for level, found in rows.items()}}


@contextmanager
def _at_least(level: int) -> Iterator[None]:
    plain = Progress.level

    def higher(self: Progress, *, recording: bool) -> int:
        return max(level, plain(self, recording=recording))

    with mock.patch.object(Progress, "level", higher):
        yield
