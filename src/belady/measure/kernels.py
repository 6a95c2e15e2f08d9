"""What an engine makes of the kernels of a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from belady.ir.hardware import HardwareProfile
from belady.ir.ops import Op
from belady.ir.plan import Plan
from belady.ir.trace import Trace


@dataclass(frozen=True, slots=True)
class Kernels:
    """What an engine makes of the kernels of a trace.

    Attributes
    ----------
    fitted
        A plan as it is carried out with them.
    seams
        Boundaries of a trace at which an action divides no kernel.
    made
        Whether a compiler makes the kernel of an op: see `with_pace_of`.
    """

    fitted: Callable[[Trace, HardwareProfile, Plan], Plan] = lambda *given: given[-1]
    seams: Callable[[Trace], Sequence[int]] = lambda trace: range(len(trace.ops) + 1)
    made: Callable[[Op], bool] = lambda op: False


# Each op has its own, as when it was watched.
ITS_OWN = Kernels()
