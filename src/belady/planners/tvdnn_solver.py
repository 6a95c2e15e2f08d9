"""Integer programs and who solves them: HiGHS, by way of SciPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from belady.errors import MissingExtraError

# Part of the objective at which the solver stops: what is left to gain.
_GAP = 1e-4


@dataclass(slots=True)
class Program:
    """Minimise ``cost @ x`` with ``rows @ x <= limits``."""

    cost: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[dict[int, float]] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    def variable(self, low: float = 0.0, high: float = 1.0, *, whole: bool = False) -> int:
        """Add a variable."""
        self.cost.append(0.0)
        self.low.append(low)
        self.high.append(high)
        self.whole.append(whole)
        return len(self.cost) - 1

    def limit(self, most: float, *terms: tuple[int, float]) -> None:
        """Add a row; terms of one variable add up."""
        row: dict[int, float] = {}
        for variable, factor in terms:
            row[variable] = row.get(variable, 0.0) + factor
        self.rows.append(row)
        self.limits.append(most)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the solver says.

    Attributes
    ----------
    solution
        Values of the variables, if it found any.
    bound
        What no solution has less of than the objective; infinite if there is none.
    complete
        Whether it ended within its time, and so knows that there is none or none better.
    """

    solution: Sequence[float] | None
    bound: float
    complete: bool


def solver() -> Callable[[Program, float], Answer]:
    """What solves a program within so many seconds.

    Raises
    ------
    MissingExtraError
        If SciPy is not installed.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csc_array
    except ImportError as error:
        raise MissingExtraError(
            "the policy tvdnn_ilp needs SciPy: install it with `pip install 'belady[solver]'`, or "
            "choose tvdnn_greedy"
        ) from error

    def solve(program: Program, limit_s: float) -> Answer:
        entries = [(x, r, c) for r, row in enumerate(program.rows) for c, x in row.items()]
        data, row, column = zip(*entries, strict=True)
        shape = len(program.rows), len(program.cost)
        result: Any = milp(
            program.cost,
            constraints=LinearConstraint(
                csc_array((data, (row, column)), shape=shape), -inf, program.limits
            ),
            integrality=program.whole,
            bounds=Bounds(program.low, program.high),
            options={"time_limit": limit_s, "mip_rel_gap": _GAP},
        )
        # Status 0 is optimal, 2 infeasible; all else is unknown.
        known = result.mip_dual_bound
        bound = inf if result.status == 2 else -inf if known is None else float(known)
        return Answer(result.x, bound, complete=result.status in (0, 2))

    return solve
