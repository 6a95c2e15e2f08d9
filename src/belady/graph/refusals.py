"""Graphs whose gradients AOTAutograd computes otherwise than plain PyTorch: they are not taken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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

    Raises
    ------
    TraceError
        If it is one.
    """
    for step in joint.forward:
        target = step.node.target
        if target in _OTHER or (device.type == "cpu" and target in _OTHER_ON_CPU):
            raise TraceError(f"plain PyTorch computes the gradient of {target} otherwise")


def refuse_shares(joint: Joint, cast: Sequence[int]) -> None:
    """Refuse a part of a model of whose gradients others have a share: see `belady.graph.bits`.

    Parameters
    ----------
    cast
        Numbers of the inputs that autocast casts.

    Raises
    ------
    TraceError
        If they may have.
    """
    if summed(joint):
        raise TraceError(
            "a part of the model uses a tensor several times, whose gradients it would sum in an "
            "order of its own, which exact=True forbids"
        )
    if cast:
        raise TraceError(
            "a part of the model casts parameters that autocast casts once for it and other "
            "parts, which exact=True forbids"
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
