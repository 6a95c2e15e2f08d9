"""vDNN's policies: ``vdnn_all``, ``vdnn_conv`` and ``vdnn_dyn``.

How its notions map onto a Trace:

=========================== ================================================================
paper                       here
=========================== ================================================================
layer                       a forward op that writes something; its type by its aten name
                            (`belady.planners.vdnn_layers.kind_of`)
X of a layer                a saved value that the saving op reads (``Save.as_input``)
other saved tensors         kept: norm statistics, pool indices, dropout masks, ACTV's Y
in-place ACTV               never offloads on its own account; what it wrote still moves as the
                            X of the next layer
classifier (FC), loss       not managed
layer 0's X                 the user's: never moved
Refcnt(X) reaches 0         the last forward op that reads the value; each input of a join has
                            its own
offload under FWD(n)        ``copy_out_after = n - 1``
sync at the end of FWD(n)   ``free_at = n + 1``
release                     nothing to do: the trace frees what nobody needs any more
prefetch when BWD(m) starts ``copy_in_at`` = first op that differentiates ``m``, or first read of
                            what ``m`` saved; at most one layer, window up to the next CONV
sync at the end of BWD(m)   ``ready_by`` = first read, which is never earlier
not prefetched in time      ``copy_in_at`` = first read, so that backward waits
(m), (p)                    least workspace, fastest, of ``Op.algorithms``; where the trace knows
                            no alternatives, and with ``exact``, the algorithms observed
=========================== ================================================================

All boundaries are rounded up to those at which the engine gets control. The paper runs each
static policy with (m) or (p) as told; here (p) is used when it fits, otherwise (m). Static
policies offload even when everything fits, as in the paper. A network without CONV layers has no
bounded search window, so ``vdnn_all`` brings its data back early, and ``vdnn_conv`` moves
nothing.

Per-layer algorithms exist in simulation alone (``Plan.layer_algorithms``); when ``vdnn_dyn``
downgrades single layers, execution asks for least workspace everywhere, which needs no more memory
but may take longer than predicted.

Source
------
::

    @inproceedings{rhu2016vdnn,
      title     = {{vDNN}: Virtualized Deep Neural Networks for Scalable, Memory-Efficient
                   Neural Network Design},
      author    = {Rhu, Minsoo and Gimelshein, Natalia and Clemons, Jason and Zulfiqar, Arslan
                   and Keckler, Stephen W.},
      booktitle = {49th Annual IEEE/ACM International Symposium on Microarchitecture (MICRO-49)},
      year      = {2016},
      doi       = {10.1109/MICRO.2016.7783721},
      note      = {arXiv:1602.08124}
    }
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from belady.ir.curves import curve
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Budget, Plan
from belady.ir.trace import Trace
from belady.planners.base import Draft, assemble, attempt, finish, fits
from belady.planners.moves import Case, Schedule, offloads, read_by, select, tier_for
from belady.planners.traits import Traits
from belady.planners.vdnn_layers import Kind, LayerInput, kind_of, layer_input, prefetches
from belady.planners.workspace import fastest, fastest_that_fit, leanest

ALL = frozenset({Kind.CONV, Kind.POOL, Kind.OTHER})
CONV = frozenset({Kind.CONV})


# Slices are not in the paper, but more is needed here: PyTorch's backward of a ReLU has three
# tensors, theirs has one.
_TRAITS = Traits(lean_as_floor=False, slices_modules=True, spares_workspace=True)


@dataclass(frozen=True, slots=True)
class VdnnStatic:
    """Offload every X of the layers of some types, needed or not.

    Attributes
    ----------
    kinds
        Types of the layers whose X moves.
    """

    name: str
    kinds: frozenset[Kind]
    version: int = 1
    traits: Traits = _TRAITS

    def __call__(
        self, trace: Trace, hardware: HardwareProfile, budget: Budget, *, exact: bool = False
    ) -> Plan:
        """See `belady.planners.base.Planner`."""
        case = Case(trace, hardware, budget, exact)
        draft = offload_inputs(case, f"{self.name}/{self.version}", self.kinds)
        fast = replace(draft, algorithms=fastest(case))
        lean = replace(draft, algorithms=leanest(case))
        return attempt(case, fast) or finish(case, lean)


@dataclass(frozen=True, slots=True)
class VdnnDyn:
    """The fastest of a ladder of trials that fits; a trial is judged by simulated memory.

    1. all + (m) must fit, else the network is untrainable;
    2. none + (p), conv + (p), all + (p);
    3. conv, then all, each layer downgraded from its fastest algorithm as far as its moment needs;
    4. all + (m).
    """

    name: str = "vdnn_dyn"
    version: int = 1
    traits: Traits = _TRAITS

    def __call__(
        self, trace: Trace, hardware: HardwareProfile, budget: Budget, *, exact: bool = False
    ) -> Plan:
        """See `belady.planners.base.Planner`."""
        case = Case(trace, hardware, budget, exact)
        planner = f"{self.name}/{self.version}"
        everything = offload_inputs(case, planner, ALL)
        least = replace(everything, algorithms=leanest(case))
        # What does not fit here fits on no step: the rest would be tried in vain.
        if not fits(case, least):
            return finish(case, least)
        made = (attempt(case, trial) for trial in _trials(case, everything))
        return next(filter(None, made), None) or finish(case, least)


VDNN_ALL = VdnnStatic("vdnn_all", ALL)
VDNN_CONV = VdnnStatic("vdnn_conv", CONV)
VDNN_DYN = VdnnDyn()


def offload_inputs(case: Case, planner: str, kinds: frozenset[Kind]) -> Draft:
    """Offload the X of layers of these types, with the algorithms observed."""
    trace = case.trace
    inputs: dict[int, LayerInput] = {}

    def wanted(index: int) -> bool:
        inputs[index] = layer_input(trace, index)
        return not kinds.isdisjoint(inputs[index].kinds)

    chosen = select(trace, wanted)
    tiers = tier_for(case, chosen)
    back = prefetches(trace, {index: inputs[index].consumer for index in tiers})
    schedules = {}
    for index in tiers:
        n = inputs[index].consumer
        schedules[index] = Schedule(n - 1, n + 1, back.get(index, read_by(trace.values[index])))
    kept = "kept: not the input of a layer that this policy offloads"
    if kinds == CONV and not any(kind_of(op) is Kind.CONV for op in trace.ops):
        kept = "kept: the model has no convolution, so vDNN's conv policy moves nothing"
    return Draft(
        planner=planner,
        kept=kept,
        reasons={index: _reason(trace, inputs[index], index in back) for index in chosen},
        moves=offloads(trace, tiers, schedules),
    )


def _reason(trace: Trace, it: LayerInput, prefetched: bool) -> str:
    kinds = " and ".join(sorted(it.kinds)) or "shares a storage"
    back = "prefetched" if prefetched else "fetched when read"
    return f"moved: layer input ({kinds}), out under {trace.locate(it.consumer)}, {back}"


def _trials(case: Case, everything: Draft) -> Iterator[Draft]:
    """Steps 2 and 3 of the ladder."""
    fast = fastest(case)
    conv = offload_inputs(case, everything.planner, CONV)
    kept = "kept: everything fits in device memory with the fastest algorithms"
    yield Draft(everything.planner, kept, algorithms=fast)
    yield replace(conv, algorithms=fast)
    yield replace(everything, algorithms=fast)
    for draft in (conv, everything):
        yield replace(draft, algorithms=fastest_that_fit(case, _without_workspace(case, draft)))


def _without_workspace(case: Case, draft: Draft) -> list[int]:
    """Device bytes held during each op by all but workspace."""
    allocator = case.hardware.allocator
    held = curve(case.trace, assemble(case, draft), allocator)
    return [
        nbytes - allocator.held(op.workspace_bytes)
        for nbytes, op in zip(held, case.trace.ops, strict=True)
    ]
