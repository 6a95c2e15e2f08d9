"""Makes the session of a `VirtualMemory`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from belady.graph.session import Session
from belady.ir.hardware import HardwareProfile
from belady.measure.monitor import Sample
from belady.measure.stages import Policy, Stage
from belady.memory.carrier import Carrier


def open_session(
    machine: tuple[Policy, HardwareProfile, Carrier],
    roots: Sequence[torch.nn.Module],
    ended: Callable[[Stage, Sample], None],
    *,
    fused: bool,
) -> Session:
    """Open a session that does not keep the owner of ``ended``, a method, alive.

    Models hold what was compiled of them, which holds the session.

    Parameters
    ----------
    fused
        Whether planned iterations run Inductor's kernels.
    """
    method = weakref.WeakMethod(ended)

    def tell(stage: Stage, sample: Sample) -> None:
        alive = method()
        if alive is not None:
            alive(stage, sample)

    inductor = None
    if fused:
        # It takes seconds to load.
        from belady.graph.inductor import Inductor

        inductor = Inductor()
    return Session(*machine, roots, tell, inductor)
