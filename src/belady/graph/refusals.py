"""Graphs whose gradients AOTAutograd computes otherwise than plain PyTorch: they are not taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from belady.errors import GraphError, TraceError
from belady.graph.bits import summed
from belady.graph.joint import Joint
from belady.ir.run import UNMANAGED

_aten = torch.ops.aten
# Plain PyTorch looks at the numbers and takes a shorter way where none is zero.
_OTHER = frozenset({_aten.prod.default, _aten.prod.dim_int})
# On a CPU plain PyTorch fills a mask where tracing multiplies by one: zeros get other signs.
_OTHER_ON_CPU = frozenset(
    {_aten.max.default, _aten.min.default, _aten.median.default, _aten.nanmedian.default}
)


def refuse_other_bits(joint: Joint, device: torch.device) -> None:
    """Refuse a graph whose gradients would not be plain PyTorch's in every bit.

    Under autocast plain PyTorch casts a parameter once and sums its gradients in the lower
    precision. AOTAutograd traces without that cache, and the sum is taken in the higher one.

    Raises
    ------
    TraceError
        If it is one.
    """
    for step in joint.forward:
        target = step.node.target
        if target in _OTHER or (device.type == "cpu" and target in _OTHER_ON_CPU):
            raise TraceError(f"plain PyTorch computes the gradient of {target} otherwise")
    casts = Counter(
        (step.node.args[0], step.node.kwargs.get("dtype"))
        for step in joint.forward
        if step.node.target is _aten._to_copy.default and step.node.args[0] in joint.primals
    )
    for (node, dtype), count in casts.items():
        if count > 1:
            raise TraceError(f"{node} is cast to {dtype} {count} times: autocast does it once")


def refuse_sums(joint: Joint) -> None:
    """Refuse a graph that sums gradients to which others may add: see `belady.graph.bits`.

    Raises
    ------
    TraceError
        If it does.
    """
    if summed(joint):
        raise TraceError(
            "a part of the model uses a tensor several times, whose gradients it would sum in an "
            "order of its own, which exact=True forbids"
        )


def unmanaged(reasons: Iterable[str]) -> list[str]:
    """One sentence for each reason why a part of a model runs as plain PyTorch."""
    return [f"{UNMANAGED}: {reason}" for reason in reasons]


def refuse_second_order() -> None:
    """Refuse a gradient of what a captured graph gave as one."""
    raise GraphError(
        "the gradients of a captured graph have no graph of their own: create_graph=True (a "
        "gradient of a gradient) needs engine='eager'"
    )
