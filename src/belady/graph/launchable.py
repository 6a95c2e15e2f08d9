"""What can be launched as it was captured, and what its kernels depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from belady.graph.joint import Joint
from belady.graph.layout import Layout


def why_not(joint: Joint, layout: Layout, args: Sequence[Any], lasting: set[int]) -> str:
    """What keeps a graph from being launched; empty where nothing does."""
    device_types = {arg.device.type for arg in args if isinstance(arg, torch.Tensor)}
    taken = {layout.storage_of.get(node, -1) for node in joint.primals}
    written = {it for step in joint.forward for it in layout.writes_to(step)}
    copied = {
        layout.storage_of.get(node, -1)
        for node, arg in zip(joint.primals, args, strict=True)
        if is_copied(arg, lasting)
    }
    results, gradients = (
        [layout.storage_of.get(it, -1) for it in given if isinstance(it, fx.Node)]
        for given in (joint.forward_outputs, joint.backward_outputs)
    )
    if len(device_types) > 1:
        return "it takes a number that is on another device"
    if copied & written:
        return "it writes to what it is given"
    if taken & {*results, *gradients} or len({*results}) < len(results):
        return "what it gives shares bytes"
    return ""


def settings() -> tuple[object, ...]:
    """What kernels depend on beside what they are given."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        matmul.fp32_precision,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
    )


def storage_of(value: Any) -> int:
    """Name of a tensor's storage while it lives; -1 for what is none."""
    return int(value.untyped_storage()._cdata) if isinstance(value, torch.Tensor) else -1


def is_copied(arg: Any, lasting: set[int]) -> bool:
    """Whether an input is copied to where a capture has it: its storage is none of ``lasting``."""
    return isinstance(arg, torch.Tensor) and storage_of(arg) not in lasting
