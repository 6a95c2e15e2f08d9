"""What can be launched as it was captured, and what its kernels depend on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from belady.graph.doors import fake_value
from belady.graph.joint import Joint
from belady.graph.layout import Layout
from belady.measure.uninitialized import initialized

_OF_SOME_VERSIONS = (
    "allow_fp16_accumulation",
    "allow_fp16_reduced_precision_reduction_split_k",
    "allow_bf16_reduced_precision_reduction_split_k",
)


def why_not(joint: Joint, layout: Layout, args: Sequence[Any], lasting: set[int]) -> str:
    """What keeps a graph from being launched; empty where nothing does."""
    devices = {arg.device for arg in args if isinstance(arg, torch.Tensor)}
    made = (it for step in (*joint.forward, *joint.backward) for it in step.made)
    fakes = map(fake_value, (*joint.tangents, *made))
    devices |= {it.device for it in fakes if isinstance(it, torch.Tensor)}
    taken = {layout.storage_of.get(node, -1) for node in joint.primals}
    written = {it for step in joint.forward for it in layout.writes_to(step)}
    copied = {
        layout.storage_of.get(node, -1)
        for node, arg in zip(joint.primals, args, strict=True)
        if passes(arg, lasting)
    }
    results, gradients = (
        [layout.storage_of.get(it, -1) for it in given if isinstance(it, fx.Node)]
        for given in (joint.forward_outputs, joint.backward_outputs)
    )
    if len(devices) > 1:
        return "not all of the graph is on one device"
    if copied & written:
        return "the graph writes to an input that is not a parameter or a buffer"
    if taken & {*results, *gradients} or len({*results}) < len(results):
        return "results or gradients of the graph share bytes with inputs or one another"
    given = (fake_value(it) for it in joint.forward_outputs if isinstance(it, fx.Node))
    if any(_repeats(it) for it in given if isinstance(it, torch.Tensor)):
        return "a result of the graph has the same bytes several times"
    return ""


def _repeats(tensor: torch.Tensor) -> bool:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and not step for size, step in pairs)


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
        cudnn.benchmark_limit,
        cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        cudnn.rnn.fp32_precision,  # type: ignore[attr-defined]
        *(getattr(matmul, name, None) for name in _OF_SOME_VERSIONS),
        torch._C._get_blas_preferred_backend(),
        torch._C._get_linalg_preferred_backend(),
    )


def storage_of(value: Any) -> int:
    """Name of a tensor's storage while it lives; -1 for what is none."""
    return int(value.untyped_storage()._cdata) if isinstance(value, torch.Tensor) else -1


def lasting_of(modules: Iterable[torch.nn.Module]) -> set[int]:
    """Names (``_cdata``) of the storages of parameters and buffers."""
    each = ((*module.parameters(), *module.buffers()) for module in modules)
    return {storage_of(it) for tensors in each for it in initialized(tensors)}


def passes(arg: Any, lasting: set[int]) -> bool:
    """Whether an input does not last: its storage is none of ``lasting``."""
    return isinstance(arg, torch.Tensor) and storage_of(arg) not in lasting


def packs(device: torch.device) -> bool:
    """Whether blocks of what is captured can be packed."""
    return device.type == "cuda"


def is_one_of_several() -> bool:
    """Whether other processes take part, whose collectives a launch would not know of."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()
