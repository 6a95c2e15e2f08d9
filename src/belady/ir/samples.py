"""Do the ops of a section treat every sample by itself?"""

from __future__ import annotations

from collections.abc import Iterator

from belady.ir.finding import forward_ops
from belady.ir.ops import FOLDED, SPREAD, Op, Phase
from belady.ir.plan import Section
from belady.ir.trace import Trace

# Whatever their arguments, these keep samples apart as long as each operand that depends on the
# batch carries it in its first dimension. Ops that may mix samples and keep the shape (a softmax
# over the batch, a roll) are not among them. They treat every row of the first dimension by itself,
# or leave the rows in their order, so a sample may have several.
_ROW_BY_ROW = frozenset(
    name
    for names in (
        "convolution cudnn_convolution mkldnn_convolution slow_conv2d_forward",
        "addmm mm linear bmm baddbmm embedding native_layer_norm native_group_norm",
        "max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d",
        "adaptive_max_pool2d adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d",
        "upsample_nearest1d upsample_nearest2d upsample_bilinear2d pixel_shuffle pixel_unshuffle",
        "relu relu_ threshold threshold_ hardtanh hardtanh_ leaky_relu leaky_relu_ elu elu_ celu",
        "celu_ selu selu_ gelu gelu_ silu silu_ mish mish_ softplus hardswish hardswish_",
        "hardsigmoid hardsigmoid_ sigmoid sigmoid_ log_sigmoid_forward tanh tanh_ _prelu_kernel",
        "clamp clamp_ clamp_min clamp_max exp exp_ log log_ sqrt sqrt_ rsqrt sin cos erf abs neg",
        "sign square reciprocal pow pow_ add add_ sub sub_ rsub mul mul_ div div_ addcmul addcmul_",
        "addcdiv maximum minimum where lerp gt lt ge le eq ne logical_not logical_and bitwise_not",
        "masked_fill masked_fill_ clone copy_ contiguous _to_copy detach alias empty_like",
        "zeros_like ones_like full_like view _unsafe_view reshape",
    )
    for name in names.split()
)
# What a dropout draws, row by row and for all slices at once. Whether it is one's, a trace does not
# say: whoever asks knows the modules.
_DRAWS = frozenset({"bernoulli_", "native_dropout"})
# These may take away, join or part rows, or give them another place. With one row a sample the
# result shows it: a batch that was summed over or parted is not there any more in the next op.
_APART = (
    _ROW_BY_ROW
    | _DRAWS
    | frozenset(
        name
        for names in (
            "constant_pad_nd reflection_pad2d replication_pad2d im2col col2im",
            "flatten t transpose permute",
            "unsqueeze squeeze expand cat stack split split_with_sizes chunk unbind",
            "sum mean amax amin max min var var_mean std norm linalg_vector_norm",
        )
        for name in names.split()
    )
)
# Of an operand without a dimension that is the batch's.
_UNNAMED = frozenset({None, SPREAD})
_GIVEN_BACK = "gives each sample back what backward has summed up over all"
_NORMS = frozenset(
    {
        "native_batch_norm",
        "cudnn_batch_norm",
        "_native_batch_norm_legit",
        "_batch_norm_with_update",
    }
)


def mixing(trace: Trace, section: Section) -> tuple[str, ...]:
    """Reasons why ``section`` may not run in slices, from what its ops do to the batch.

    Parameters
    ----------
    trace
        With `Op.batch_dims`, see `belady.measure.batch`.

    Returns
    -------
    tuple
        Empty if every op is known to act on each sample by itself, or is a batch norm.
    """
    passes = [forward_ops(trace, section, index) for index in range(len(trace.roots))]
    found = [(at, reason) for ops in passes for at, reason in _reasons(trace, ops)]
    if not found:
        found = [(at, _GIVEN_BACK) for ops in passes for at in _given_back(trace, ops)]
    return tuple(f"{trace.locate(at)} {reason}" for at, reason in found)


def _reasons(trace: Trace, ops: tuple[int, ...]) -> Iterator[tuple[int, str]]:
    # Values that carry samples: all that comes from before and does not persist, and what it makes.
    carrying = {
        value
        for at in ops
        for value in trace.ops[at].reads
        if trace.values[value].producer < ops[0]
        and not trace.storages[trace.values[value].storage].persistent
    }
    # Of these, what may have its rows in another order than that of the samples.
    astray: set[int] = set()
    for at in ops:
        op = trace.ops[at]
        samples = [value in carrying for value in op.reads]
        if any(samples):
            carrying.update(op.writes)
            if _name(op) not in _ROW_BY_ROW | _DRAWS:
                astray.update(op.writes)
        reason = _reason(op, any(samples), samples)
        if not reason and FOLDED in op.batch_dims and astray.intersection(op.reads):
            reason = "has several rows a sample, which may not be in the order of the samples"
        if reason:
            yield at, reason


def _given_back(trace: Trace, forward: tuple[int, ...]) -> Iterator[int]:
    """Backward ops that read a sum over the samples beside what has them.

    What slices sum up are gradients of parameters, which nothing of a sample depends on. A gradient
    that is clipped by its norm (a hook, a function of the user's) would be, slice by slice.
    """
    inside = set(forward)
    ops = [at for at, op in enumerate(trace.ops) if op.forward_op in inside]
    backward = range(ops[0], ops[-1] + 1) if ops else ()
    summed: set[int] = set()
    for at in backward:
        op = trace.ops[at]
        if op.phase is not Phase.BACKWARD:
            continue
        if len(op.batch_dims) == len(op.reads):
            whole = {
                value for value, dim in zip(op.reads, op.batch_dims, strict=True) if dim is None
            }
        else:
            whole = set(op.reads) if None in op.batch_dims else set()
        samples = any(dim is not None for dim in op.batch_dims)
        if samples and whole & summed:
            yield at
        if samples or summed.intersection(op.reads):
            summed.update(op.writes)


def _name(op: Op) -> str:
    return op.name.removeprefix("aten.").split(".")[0]


def _reason(op: Op, dependent: bool, samples: list[bool]) -> str:
    name = _name(op)
    if op.random and name not in _DRAWS:
        return "draws random numbers, and slices would draw others than the batch"
    if op.communicates:
        return "communicates"
    if not dependent:
        return ""
    if name not in _APART | _NORMS:
        return "is not known to act on each sample by itself"
    if not op.batch_dims:
        return "has operands whose batch dimension is not known"
    dims = set(op.batch_dims) - _UNNAMED
    if dims == {FOLDED}:
        if name not in _ROW_BY_ROW | _DRAWS:
            return "is not known to act on each row by itself, and a sample has several"
    elif dims != {0}:
        return "does not have the batch in the first dimension of what it reads"
    # One dimension for each operand, in order; a value read twice stands once among the reads.
    known = zip(samples, op.batch_dims, strict=False)
    if len(op.batch_dims) != len(samples):
        whole = not _UNNAMED.isdisjoint(op.batch_dims)
    else:
        whole = any(carries and dim in _UNNAMED for carries, dim in known)
    return "reads what comes from all samples, or has no dimension of the batch" if whole else ""
