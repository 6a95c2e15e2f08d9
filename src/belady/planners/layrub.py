"""Layrub's policies: ``layrub_inter``, ``layrub_intra`` and ``layrub_hybrid``.

How its notions map onto a Trace:

=========================== ================================================================
paper                       here
=========================== ================================================================
layer                       a forward op that reads and writes something, the loss included
activations of a layer      saved values whose last forward reader it is (reference count 0)
the last two layers         their activations stay
migration under FWD(n)      ``copy_out_after = n - 1``: beside the layer's kernels
both streams synchronised   ``free_at = n + 1``: what follows waits for the copy
at the end of FWD(n)
load-in of exactly one      ``copy_in_at`` = where the backward begins that comes before the one
layer                       that reads the value; the read waits for it
coordinated order (intra)   `belady.ordered`, or of graphs `belady.graph.coordinated`, which the
                            engine puts in force for ``layrub_intra`` and ``layrub_hybrid``: it is
                            in the trace that they are given
sign of a ReLU's output as  the same, for `torch.nn.ReLU`; taken where the layer that reads the
one byte an element         output lets go of it, and not in forward, where it would be held beside
                            the output, which that layer has saved
=========================== ================================================================

``layrub_inter`` moves; ``layrub_intra`` moves nothing, its gain being the order; ``layrub_hybrid``,
the paper's default, does both. All boundaries are rounded up to those at which the engine gets
control.

Not expressed: the fixed set of largest buffers that all layers use in turn (the caching allocator
hands out blocks, and a trace counts what is held); in the eager engine the sign of a ReLU that is
called as a function;
gradients that the branches of a fork share, and temporaries that norms share (autograd makes them).

Source
------
::

    @article{jin2018layrub,
      title   = {Layer-Centric Memory Reuse and Data Migration for Extreme-Scale Deep Learning
                 on Many-Core Architectures},
      author  = {Jin, Hai and Liu, Bo and Jiang, Wenbin and Ma, Yang and Shi, Xuanhua and
                 He, Bingsheng and Zhao, Shaofeng},
      journal = {ACM Transactions on Architecture and Code Optimization},
      volume  = {15},
      number  = {3},
      year    = {2018},
      doi     = {10.1145/3243904}
    }
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Budget, Plan
from belady.ir.trace import Phase, Trace
from belady.planners.base import Draft, finish
from belady.planners.moves import Case, Schedule, offloads, read_by, select, tier_for
from belady.planners.traits import Coordinated, Traits
from belady.planners.vdnn_layers import backward_starts, layer_input

# [extreme-scale networks] They are read again at once.
_KEPT_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Layrub:
    """Offload the activations of every layer but the last two, or nothing, needed or not.

    Attributes
    ----------
    migrates
        Whether anything moves.
    """

    name: str
    migrates: bool
    version: int = 1
    traits: Traits = Traits()

    def __call__(
        self, trace: Trace, hardware: HardwareProfile, budget: Budget, *, exact: bool = False
    ) -> Plan:
        """See `belady.planners.base.Planner`; every plan of these policies is exact."""
        case = Case(trace, hardware, budget, exact)
        planner = f"{self.name}/{self.version}"
        kept = Draft(planner, "kept: the policy reuses memory inside of layers and moves nothing")
        return finish(case, _migration(case, planner) if self.migrates else kept)


LAYRUB_INTER = Layrub("layrub_inter", migrates=True)
_REUSES = Traits(coordinated=Coordinated.ALWAYS)
LAYRUB_INTRA = Layrub("layrub_intra", migrates=False, traits=_REUSES)
LAYRUB_HYBRID = Layrub("layrub_hybrid", migrates=True, traits=_REUSES)


def _migration(case: Case, planner: str) -> Draft:
    """Inter-layer reuse: what the layers before the last two have saved is away in between."""
    trace = case.trace
    last = set(_layers(trace)[-_KEPT_LAYERS:])
    consumers = {index: layer_input(trace, index).consumer for index in trace.saved}
    chosen = select(trace, lambda index: consumers[index] not in last)
    tiers = tier_for(case, chosen)
    starts = _backwards(trace)
    schedules = {}
    for index in tiers:
        layer = consumers[index]
        back = _one_layer_before(starts, read_by(trace.values[index]))
        schedules[index] = Schedule(layer - 1, layer + 1, back)
    return Draft(
        planner=planner,
        kept="kept: an activation of the last two layers",
        reasons={
            index: f"moved: an activation, out under {trace.locate(consumers[index])}"
            for index in chosen
        },
        moves=offloads(trace, tiers, schedules),
    )


def _layers(trace: Trace) -> list[int]:
    """Forward ops that are layers, ascending; what makes numbers out of nothing is none."""
    return [
        index
        for index, op in enumerate(trace.ops)
        if op.phase in (Phase.FORWARD, Phase.LOSS) and op.reads and op.writes
    ]


def _backwards(trace: Trace) -> list[int]:
    """Boundaries at which the backward of a layer begins, ascending."""
    layers = set(_layers(trace))
    return sorted({start for m, start in backward_starts(trace).items() if m in layers})


def _one_layer_before(starts: Sequence[int], read: int) -> int:
    """Where the backward begins that comes before the one in which ``read`` lies."""
    own = bisect_right(starts, read) - 1
    return starts[own - 1] if own > 0 else read
