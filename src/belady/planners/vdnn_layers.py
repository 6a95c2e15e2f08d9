"""A Trace seen as vDNN sees a network: layers, their inputs, their backward."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from belady.ir.trace import Op, Phase, StorageKind, Trace
from belady.planners.moves import read_by


class Kind(StrEnum):
    """Type of a layer; OTHER are the remaining layers of feature extraction (norms, joins, …)."""

    CONV = "CONV"
    POOL = "POOL"
    ACTV = "ACTV"
    FC = "FC"
    OTHER = "OTHER"
    NONE = "no layer"


# fmt: off
_ACTV = frozenset({
    "celu", "clamp", "clamp_max", "clamp_min", "elu", "gelu", "glu", "hardshrink",
    "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "log_sigmoid_forward", "mish",
    "prelu", "prelu_kernel", "relu", "relu6", "rrelu_with_noise", "rrelu_with_noise_functional",
    "selu", "sigmoid", "silu", "softplus", "softshrink", "tanh", "threshold",
})
_FC = frozenset({
    "addbmm", "addmm", "addmm_activation", "addmv", "baddbmm", "bmm", "dot", "einsum", "linear",
    "matmul", "mm", "mv", "scaled_mm",
})
# fmt: on


def kind_of(op: Op) -> Kind:
    """Type of the layer that a forward op is, by its name.

    An op that writes nothing (a view) is no layer, and the loss is not managed.
    """
    if op.phase is not Phase.FORWARD or not op.writes:
        return Kind.NONE
    base = op.name.split("::")[-1].removeprefix("aten.").split(".")[0].strip("_")
    if base in _ACTV:
        return Kind.ACTV
    if base in _FC:
        return Kind.FC
    if "conv" in base:
        return Kind.CONV
    return Kind.POOL if "pool" in base else Kind.OTHER


@dataclass(frozen=True, slots=True)
class LayerInput:
    """A saved value as the X of layers.

    Attributes
    ----------
    kinds
        Types of the layers whose X it is; empty when it is nobody's (statistics, indices, masks).
    consumer
        The layer under which it leaves: the last that reads it in forward (Refcnt reaches 0).
    """

    kinds: frozenset[Kind]
    consumer: int


def layer_input(trace: Trace, index: int) -> LayerInput:
    """See a saved value as the X of layers; layer 0's comes from the user and is nobody's."""
    value = trace.values[index]
    savers = [save.op for save in value.saves if save.as_input]
    if trace.storages[value.storage].kind is StorageKind.INPUT:
        kinds: frozenset[Kind] = frozenset()
    else:
        kinds = frozenset(kind_of(trace.ops[op]) for op in savers) - {Kind.NONE}
    readers = [
        use.op
        for use in value.uses
        if trace.ops[use.op].phase in (Phase.FORWARD, Phase.LOSS) and use.op < read_by(value)
    ]
    return LayerInput(kinds, max([*savers, *readers, *(save.op for save in value.saves)]))


def backward_starts(trace: Trace) -> dict[int, int]:
    """Boundary at which BWD(m) begins, for every layer ``m`` that has one.

    It is the first op that differentiates ``m``; where a trace knows of none, the first read of
    what ``m`` saved. In the coordinated order that of a ReLU comes before: in the backward of the
    layer that reads its result.
    """
    starts: dict[int, int] = {}
    for index, op in enumerate(trace.ops):
        if op.phase is Phase.BACKWARD and op.forward_op is not None:
            starts.setdefault(op.forward_op, index)
    read: dict[int, int] = {}
    for save in (save for value in trace.values for save in value.saves):
        for boundary in save.reads:
            read[save.op] = min(boundary, read.get(save.op, boundary))
    starts = read | starts
    return {m: start for m, start in starts.items() if _is_layer(trace.ops[m])}


def find_prefetch(m: int, pending: Sequence[int], convs: Sequence[int]) -> int:
    """Layer to bring back while BWD(m) runs, or -1.

    It is the nearest offloaded layer below ``m`` that has not been prefetched, unless a CONV
    lies in between. Same answers as the loop in the paper, by bisection.

    Parameters
    ----------
    pending
        Layers offloaded and not yet prefetched, ascending.
    convs
        CONV layers, ascending.
    """
    at, window = bisect_left(pending, m), bisect_left(convs, m)
    nearest = pending[at - 1] if at else -1
    end = convs[window - 1] if window else -1
    return nearest if nearest >= end else -1


def prefetches(trace: Trace, offloaded: Mapping[int, int]) -> dict[int, int]:
    """Boundary at which each value is prefetched; those that no layer brings back in time lack.

    Parameters
    ----------
    offloaded
        Layer under which each offloaded value left.
    """
    convs = [m for m, op in enumerate(trace.ops) if kind_of(op) is Kind.CONV]
    values_of: dict[int, list[int]] = {}
    for index, layer in offloaded.items():
        if trace.values[index].first_read is not None:
            values_of.setdefault(layer, []).append(index)
    pending = sorted(values_of)
    found: dict[int, int] = {}
    for start, m in sorted((start, m) for m, start in backward_starts(trace).items()):
        chosen = find_prefetch(m, pending, convs)
        # A layer that has been read already came back by itself: as good as prefetched.
        while chosen >= 0 and not (absent := _absent(trace, values_of[chosen], start)):
            pending.remove(chosen)
            chosen = find_prefetch(m, pending, convs)
        if chosen >= 0:
            pending.remove(chosen)
            found |= dict.fromkeys(absent, start)
    return found


def _absent(trace: Trace, values: Iterable[int], boundary: int) -> list[int]:
    return [index for index in values if read_by(trace.values[index]) > boundary]


def _is_layer(op: Op) -> bool:
    return bool(op.writes) and op.phase in (Phase.FORWARD, Phase.LOSS)
