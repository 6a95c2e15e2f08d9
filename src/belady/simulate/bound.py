"""How fast any plan of Keep, Offload, Recompute and Encode could be: a linear relaxation.

The starts and ends of chosen ops cut the iteration into segments. In each, bytes may be copied
out and in by fractions of a value, as long as the links have the time, or made again, which takes
compute the seconds of the cheapest replay. A real plan is a solution of this, so its time is never
below the optimum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from belady.errors import MissingExtraError
from belady.ir.hardware import HardwareProfile
from belady.ir.margin import needed, rooms
from belady.ir.plan import Budget, Plan
from belady.ir.timeline import Lane, Timeline
from belady.ir.trace import Trace
from belady.simulate.engine import simulate
from belady.simulate.movable import Movable, movable, ports
from belady.simulate.relaxation import Relaxation, Segments, relax

_SAMPLES = 32
_SOLVER_SECONDS = 10.0
# Where the solver does not come to an end, it is asked once more with so many times fewer samples.
_COARSER = 4
_OPTIMAL = "optimal"
# HiGHS lets rows be violated by 1e-7; what that could add is taken off the bound.
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Bound:
    """What no plan of ``decisions`` can beat.

    Attributes
    ----------
    seconds
        Lower bound of an iteration, in seconds; infinite when no plan fits.
    stall_seconds
        Part of it beyond the iteration that keeps everything.
    status
        ``"kept"`` (nothing has to move), ``"optimal"``, ``"infeasible"``, or the solver's words
        where it gave up, and the bound is that of keeping everything.
    op
        Index of the op that needs most bytes when all that may move is away.
    needed_bytes
        Smallest device budget in which that op fits, allocator margin included.
    segments
        Segments of the relaxation; more make the bound tighter.
    decisions
        Decisions that a plan may take for the bound to hold, with the algorithms observed.
    """

    seconds: float
    stall_seconds: float
    status: str
    op: int
    needed_bytes: int
    segments: int = 0
    decisions: tuple[str, ...] = ("Keep", "Offload", "Recompute", "Encode")

    @property
    def feasible(self) -> bool:
        """Whether some plan may fit the budget; False is certain, True is not."""
        return self.status != "infeasible"

    def gap(self, seconds: float) -> float:
        """Fraction by which ``seconds`` exceeds the bound; 0 is provably optimal."""
        return seconds / self.seconds - 1 if self.seconds > 0 else 0.0


def bound(
    trace: Trace,
    hardware: HardwareProfile,
    budget: Budget,
    *,
    samples: int = _SAMPLES,
    solver_seconds: float = _SOLVER_SECONDS,
) -> Bound:
    """Bound the seconds of every plan of Keep, Offload, Recompute and Encode within ``budget``.

    Host and disk budgets are not considered, which can only make the bound lower.

    Parameters
    ----------
    samples
        Most ops at which time is cut; fewer make it lower and sooner known.
    solver_seconds
        How long the solver may take; as long again, with fewer samples, where that was too short.

    Raises
    ------
    MissingExtraError
        If something has to move and SciPy is not installed.
    """
    keep = simulate(trace, hardware, Plan(trace.fingerprint, "keep", budget))
    if not trace.ops:
        return Bound(keep.seconds, 0.0, "kept", 0, hardware.allocator.budget_for(0))
    links = ports(hardware)
    items = movable(trace, hardware, links)
    # Bytes that go without a copy of their own are gone in every plan.
    held = _without(list(keep.curve), [item for item in items if item.value < 0])
    items = [item for item in items if item.value >= 0]
    floor = _without(held, items)
    least, op = needed(trace, hardware.allocator, floor)
    if least > budget.device_bytes:
        return Bound(math.inf, math.inf, "infeasible", op, least)
    limits = rooms(trace, hardware.allocator, budget.device_bytes)
    over = [have - limit for have, limit in zip(held, limits, strict=True)]
    found = Bound(keep.seconds, 0.0, "kept", op, least)
    for count in (samples, max(1, samples // _COARSER)):
        cuts = _samples(over, count)
        if not cuts:
            break
        segments = _segments(trace, keep, cuts, [over[i] for i in cuts])
        seconds, status = _solve(relax(segments, items, links), keep.seconds, solver_seconds)
        found = Bound(seconds, seconds - keep.seconds, status, op, least, 2 * len(cuts) + 1)
        if status == _OPTIMAL:
            break
    return found


def _without(held: list[int], items: list[Movable]) -> list[int]:
    change = [0] * (len(held) + 1)
    for item in items:
        change[item.start] -= item.nbytes
        change[item.end] += item.nbytes
    return [have + less for have, less in zip(held, accumulate(change), strict=False)]


def _samples(excess: list[int], most: int) -> list[int]:
    """Ops whose memory is constrained: of each run of those over the limit the one most over it."""
    over = [op for op, nbytes in enumerate(excess) if nbytes > 0]
    count = min(len(over), most)
    cuts = [len(over) * part // count for part in range(count + 1)] if count else []
    return [max(over[low:high], key=excess.__getitem__) for low, high in pairwise(cuts)]


def _segments(trace: Trace, keep: Timeline, samples: list[int], excess: list[int]) -> Segments:
    serial = trace.device == "cpu"
    lane = Lane.HOST if serial else Lane.COMPUTE
    starts = {span.op: span.start_s for span in keep.spans if span.lane is lane}
    busy = [op.device_seconds + (op.host_seconds if serial else 0.0) for op in trace.ops]
    return Segments(
        samples=samples,
        excess=excess,
        earliest=[starts[op] for op in samples] + [keep.seconds],
        busy=[0.0, *accumulate(busy)],
    )


def _solve(problem: Relaxation, keep_seconds: float, most_seconds: float) -> tuple[float, str]:
    try:
        from scipy.optimize import linprog
        from scipy.sparse import coo_array
    except ImportError as error:
        raise MissingExtraError(
            "the bound needs SciPy: install it with `pip install 'belady[solver]'`"
        ) from error

    def matrix(rows: list[dict[int, float]]) -> Any:
        entries = [(r, c, x) for r, row in enumerate(rows) for c, x in row.items()]
        row, column, data = zip(*entries, strict=True) if entries else ((), (), ())
        return coo_array((data, (row, column)), shape=(len(rows), len(problem.bounds)))

    cost = [0.0] * len(problem.bounds)
    cost[problem.objective] = 1.0
    result = linprog(
        cost,
        A_ub=matrix(problem.at_most),
        b_ub=problem.limits,
        A_eq=matrix(problem.equal) if problem.equal else None,
        b_eq=[0.0] * len(problem.equal) if problem.equal else None,
        bounds=problem.bounds,
        method="highs",
        options={"time_limit": most_seconds},
    )
    if result.status != 0:
        return keep_seconds, str(result.message)
    return max(keep_seconds, result.fun * problem.unit_s * (1 - _TOLERANCE)), _OPTIMAL
