"""Every error that belady raises on purpose.

::

    BeladyError
    ├── BudgetError                 (ValueError)   a budget that cannot be read
    ├── InfeasibleBudgetError       the smallest working set exceeds the budget
    ├── DocumentError               (ValueError)   a JSON document that is not what it says
    ├── PlanMismatchError           a plan made for another trace
    │   └── ReplayError             bytes that were made again came out otherwise
    ├── TierError                   a tier that cannot take or give back bytes
    │   ├── TierFullError           its capacity or budget is used up
    │   └── SpillError              reading or writing spilled bytes failed
    ├── OutOfMemoryError            (MemoryError)  the device ran out in spite of the plan
    ├── StaleValueError             (RuntimeError) a saved tensor was changed in place
    ├── TraceError                  an iteration that cannot be traced
    ├── SectionError                modules that cannot run in slices
    ├── OrderError                  a gradient that the coordinated order cannot give
    ├── GraphError                  a gradient that a captured graph cannot give
    └── MissingExtraError           (ImportError)  an optional dependency is absent

Errors of the user's own code are never wrapped: they come out as they went in.
"""

from __future__ import annotations

import functools


class BeladyError(Exception):
    """Base class of all errors raised by belady."""


class BudgetError(BeladyError, ValueError):
    """A budget that cannot be read: wrong type, unit, sign or size."""


class InfeasibleBudgetError(BeladyError):
    """No plan of the chosen policy fits the budget.

    Parameters
    ----------
    needed_bytes
        Bytes that the decisive op needs, allocator rounding and margin included.
    budget_bytes
        Bytes that were given.
    smallest_bytes
        Smallest budget of this policy that is feasible.
    op
        Name of the op at the peak.
    module
        Path of the module that issued it.
    """

    def __init__(
        self, *, needed_bytes: int, budget_bytes: int, smallest_bytes: int, op: str, module: str
    ) -> None:
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes
        self.op = op
        self.module = module
        super().__init__(
            f"a budget of {budget_bytes} bytes is too small: {op} in module {module!r} needs "
            f"{needed_bytes} bytes at once; the smallest feasible budget of this policy is "
            f"{smallest_bytes} bytes"
        )

    def __reduce__(self) -> tuple[object, ...]:
        """What another process makes it from, which has no use for the message alone."""
        made = functools.partial(
            type(self),
            needed_bytes=self.needed_bytes,
            budget_bytes=self.budget_bytes,
            smallest_bytes=self.smallest_bytes,
            op=self.op,
            module=self.module,
        )
        return made, (), self.__dict__


class DocumentError(BeladyError, ValueError):
    """A JSON document that is malformed, of another version, or absurd.

    The message starts with the path inside the document, e.g. ``ops[3].reads``.
    """


class PlanMismatchError(BeladyError):
    """A plan was given to something other than the trace that it was made for."""


class ReplayError(PlanMismatchError):
    """Bytes that were made again came out otherwise: the program is not the one of the trace."""


class TierError(BeladyError):
    """A tier cannot take bytes or give them back."""


class TierFullError(TierError):
    """The capacity or the budget of a tier is used up."""


class SpillError(TierError):
    """Reading or writing spilled bytes failed; the cause is the operating system's error."""


class OutOfMemoryError(BeladyError, MemoryError):
    """The device ran out of memory in spite of the plan; the cause is torch's own error."""


class StaleValueError(BeladyError, RuntimeError):
    """A tensor needed by backward was changed in place after it had been saved."""


class TraceError(BeladyError):
    """An iteration that cannot be traced."""


class SectionError(BeladyError):
    """Modules cannot run in slices; the message says which and why."""


class OrderError(BeladyError):
    """A layer goes backward in the coordinated order, and is asked for what that cannot give."""


class GraphError(BeladyError):
    """A captured graph is asked for a gradient that it cannot give, or not in the same bits."""


class MissingExtraError(BeladyError, ImportError):
    """An optional dependency is absent; the message names the extra to install."""
