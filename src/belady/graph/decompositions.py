"""Ops that AOTAutograd traces otherwise than plain PyTorch runs them, traced as it runs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from belady.errors import TraceError
from belady.graph.joint import Joint

_aten = torch.ops.aten


def as_eager(device: torch.device) -> dict[Any, Callable[..., Any]]:
    """What to trace in place of an op on ``device`` so that every bit is plain PyTorch's."""
    if device.type != "cpu":
        return {}
    return {
        _aten.native_dropout.default: _dropout,
        _aten.native_dropout_backward.default: _dropout_backward,
    }


def _dropout(x: Any, p: float, train: bool | None) -> Any:
    """On a CPU plain PyTorch multiplies by a scaled mask of the input's own type."""
    if train is False or x.numel() == 0:
        return x, torch.ones_like(x)
    noise = torch.zeros_like(x) if p == 1 else torch.empty_like(x).bernoulli(1 - p)
    mask = noise if p == 1 else noise.div(1 - p)
    return x * mask, mask


def _dropout_backward(gradient: Any, mask: Any, scale: float) -> Any:
    return gradient * mask


def refuse_repeated_casts(joint: Joint) -> None:
    """Refuse a graph that casts one input several times to one type.

    Under autocast plain PyTorch casts a parameter once and sums its gradients in the lower
    precision. AOTAutograd traces without that cache, and the sum is taken in the higher one.

    Raises
    ------
    TraceError
        If there is such an input.
    """
    casts = Counter(
        (step.node.args[0], step.node.kwargs.get("dtype"))
        for step in joint.forward
        if step.node.target is _aten._to_copy.default and step.node.args[0] in joint.primals
    )
    for (node, dtype), count in casts.items():
        if count > 1:
            raise TraceError(f"{node} is cast to {dtype} {count} times: autocast does it once")
