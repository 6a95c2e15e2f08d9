"""What kind of op a step of a graph is."""

from __future__ import annotations

import re
from typing import Any

import torch

from belady.graph.joint import Step
from belady.ir.ops import Fusion
from belady.measure.recipes import IN_PLACE, REPLAYABLE
from belady.measure.records import draws

_DATA_DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_COLLECTIVES = ("_c10d_functional", "c10d", "_dtensor", "_c10d_functional_autograd")

# The same bits for the same inputs, on one device with one setting of its libraries, from torch's
# notes on determinism; what adds up in no fixed order (scatter, index_add, cumsum) is left out, and
# so is every op of others.
_WORDS = (
    "convolution addmm mm bmm baddbmm mv dot embedding _native_batch_norm_legit_functional "
    "_native_batch_norm_legit.no_stats "
    "mean.default mean.dim sum.default sum.dim_IntList var_mean.correction var.correction amax "
    "amin max.dim min.dim argmax logsumexp linalg_vector_norm any.default any.dim any.dims "
    "all.default eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor le.Scalar le.Tensor "
    "gt.Scalar gt.Tensor ge.Scalar ge.Tensor logical_and logical_or logical_not bitwise_and.Tensor "
    "bitwise_or.Tensor bitwise_not maximum minimum clamp_min clamp_max clamp.Tensor rsub.Scalar "
    "rsub.Tensor sin cos erf tan atan expm1 log1p log2 sign floor ceil round square "
    "pow.Tensor_Tensor pow.Scalar remainder.Scalar remainder.Tensor addcmul addcdiv lerp.Scalar "
    "lerp.Tensor glu log_sigmoid_forward _prelu_kernel hardshrink softshrink celu selu "
    "constant_pad_nd reflection_pad2d replication_pad2d roll flip tril triu repeat gather "
    "index_select slice_scatter select_scatter full zeros ones full_like zeros_like ones_like "
    "arange.default arange.start arange.start_step scalar_tensor upsample_nearest2d.vec "
    "upsample_bilinear2d upsample_bilinear2d.vec"
)
# Kernels of libraries, of which a compiler makes calls.
_ALONE = re.compile(r"convolution|mm\b|mv\b|dot\b|attention|embedding|_foreach|fft|rnn|lstm|gru")
# Pointwise, though torch (2.13, 2.11) does not tag them so.
_UNTAGGED = frozenset(
    {
        "_prelu_kernel", "_to_copy", "elu_backward", "hardsigmoid_backward", "hardswish",
        "hardswish_backward", "hardtanh_backward", "leaky_relu", "leaky_relu_backward",
        "masked_fill", "mish_backward", "softplus_backward",
    }
)  # fmt: skip
# Ours, of which a compiler makes kernels (`belady.graph.pools`).
POOLED = frozenset({"belady.max_pool.default", "belady.max_pool_backward.default"})
_NORMS = re.compile(r"^_?native_(batch|layer|group)_norm\w*$(?<!_backward)")
_SAME_AGAIN = frozenset(f"aten.{w if '.' in w else w + '.default'}" for w in _WORDS.split())
_REPEATABLE = (REPLAYABLE - IN_PLACE) | _SAME_AGAIN | POOLED


def name_of(step: Step) -> str:
    """The operator, as torch names it."""
    return str(step.node.target)


def is_fused(name: str) -> bool:
    """Whether a compiler makes one kernel of an op with this name and of its neighbours."""
    namespace, _, op = name.partition(".")
    return (namespace == "aten" and not _ALONE.search(op)) or name in POOLED


def is_pointwise(target: Any) -> bool:
    """Whether each element of what an operator gives is of one element of what it reads."""
    if torch.Tag.pointwise in getattr(target, "tags", ()):
        return True
    known = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    return known and target.overloadpacket.__name__ in _UNTAGGED


def fusion_of(name: str) -> Fusion:
    """With which neighbours a compiler surely makes one kernel of an op with this name."""
    if not is_fused(name):
        return Fusion.NONE
    packet, _, overload = name.removeprefix("aten.").partition(".")
    op = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if is_pointwise(op):
        return Fusion.AROUND
    # Of a norm what it reads is read twice, first for the statistics.
    return Fusion.AFTER if _NORMS.search(packet) else Fusion.NONE


def is_random(step: Step) -> bool:
    """Whether it draws random numbers."""
    return draws(step.node.target, step.node.args, step.node.kwargs)


def communicates(step: Step) -> bool:
    """Whether it talks to other processes."""
    return getattr(step.node.target, "namespace", "") in _COLLECTIVES


def is_repeatable(step: Step) -> bool:
    """Whether it gives the same bits again and touches nothing else."""
    name = name_of(step)
    return (
        name in _REPEATABLE
        and not is_random(step)
        and not communicates(step)
        and not any(tag in _tags(step) for tag in _DATA_DEPENDENT)
    )


def sequence_of(step: Step) -> int:
    """Number that a step of forward shares with those that differentiate it; -1 without one."""
    return int(step.node.meta.get("seq_nr", -1))


def _tags(step: Step) -> Any:
    return getattr(step.node.target, "tags", ())
