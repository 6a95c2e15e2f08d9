"""Graphs that AOTAutograd computes otherwise than plain PyTorch: they are not taken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from belady.errors import GraphError, TraceError
from belady.graph.bits import reached, summed
from belady.graph.doors import fake_value
from belady.graph.joint import Joint, Step
from belady.ir.run import UNMANAGED
from belady.memory.geometry import steps_of

_aten = torch.ops.aten
# Plain PyTorch looks at the numbers and takes a shorter way where none is zero.
_OTHER = frozenset({_aten.prod.default, _aten.prod.dim_int})
# On a CPU plain PyTorch fills a mask where tracing multiplies by one: zeros get other signs.
_OTHER_ON_CPU = frozenset(
    {_aten.max.default, _aten.min.default, _aten.median.default, _aten.nanmedian.default}
)
# Plain PyTorch fills a tensor in place, along its bytes; what is traced makes another one, whose
# bytes can lie otherwise: the same numbers fall to other elements.
_FILLED = frozenset(
    {
        _aten.bernoulli.p, _aten.normal_functional.default,
        _aten.rrelu_with_noise_functional.default,
    }
)  # fmt: skip


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


def refuse_other_draws(joint: Joint) -> None:
    """Refuse a graph whose random numbers would not fall where those of plain PyTorch do.

    Raises
    ------
    TraceError
        If it is one.
    """
    for step in joint.forward:
        if step.node.target in _FILLED and not _lies_alike(step):
            raise TraceError(
                f"plain PyTorch draws the numbers of {step.node.target} in another order: "
                "engine='eager' manages it"
            )


def _lies_alike(step: Step) -> bool:
    """Whether the elements of all tensors that a step reads and makes lie in one order.

    What shows one element in several places cannot be filled: it only gives a shape.
    """
    values = [fake_value(node) for node in (*step.inputs, *step.made)]
    orders = {steps_of(it) for it in values if isinstance(it, torch.Tensor)}
    return len({order for order in orders if 0 not in order}) <= 1


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


def refuse_several(joint: Joint) -> None:
    """Refuse a graph of which several results lead to one gradient: see `belady.graph.bits`.

    Raises
    ------
    TraceError
        If it is one.
    """
    if any(len(tangents) > 1 for tangents in reached(joint)):
        raise TraceError(
            "a loss may not use all results, and a gradient of zero would be added for the others, "
            "which exact=True forbids"
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
