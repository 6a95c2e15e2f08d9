"""Train a network that does not fit in device memory, on the device it has, with the same results.

>>> import belady
>>> vm = belady.virtualize(model, budget="12GiB")  # doctest: +SKIP

What needs torch is loaded on first use, so that traces, plans and reports can be handled where
torch is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from belady._version import __version__
from belady.errors import (
    BeladyError,
    BudgetError,
    DocumentError,
    GraphError,
    InfeasibleBudgetError,
    MissingExtraError,
    OrderError,
    OutOfMemoryError,
    PlanMismatchError,
    ReplayError,
    SectionError,
    SpillError,
    StaleValueError,
    TierError,
    TierFullError,
    TraceError,
)

if TYPE_CHECKING:
    from belady.eager.save_on import save_on
    from belady.sections.cross_entropy import cross_entropy
    from belady.virtual import VirtualMemory, virtualize

__all__ = [
    "BeladyError",
    "BudgetError",
    "DocumentError",
    "GraphError",
    "InfeasibleBudgetError",
    "MissingExtraError",
    "OrderError",
    "OutOfMemoryError",
    "PlanMismatchError",
    "ReplayError",
    "SectionError",
    "SpillError",
    "StaleValueError",
    "TierError",
    "TierFullError",
    "TraceError",
    "VirtualMemory",
    "__version__",
    "cross_entropy",
    "save_on",
    "virtualize",
]

_LAZY = {
    "VirtualMemory": "belady.virtual",
    "cross_entropy": "belady.sections.cross_entropy",
    "save_on": "belady.eager.save_on",
    "virtualize": "belady.virtual",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
