"""Do the ops of a section treat every sample, or every token, by itself?"""

from __future__ import annotations

from collections.abc import Iterator

from belady.ir.finding import brought, forward_ops
from belady.ir.ops import FOLDED, SPREAD, Op, Phase
from belady.ir.plan import Section
from belady.ir.trace import Trace


def _names(*lines: str) -> frozenset[str]:
    return frozenset(name for line in lines for name in line.split())


# These move no bytes, and where the samples are afterwards is known of each operand.
_VIEWS = _names(
    "view _unsafe_view reshape _reshape_alias alias detach t transpose permute unsqueeze squeeze",
    "expand select slice narrow split split_with_sizes chunk unbind diagonal view_as_real",
    "view_as_complex",
)
# Element by element, wherever the batch is, as long as it is in the same place in all operands.
_ELEMENTWISE = _names(
    "relu relu_ threshold threshold_ hardtanh hardtanh_ leaky_relu leaky_relu_ elu elu_ celu",
    "celu_ selu selu_ gelu gelu_ silu silu_ mish mish_ softplus hardswish hardswish_",
    "hardsigmoid hardsigmoid_ sigmoid sigmoid_ log_sigmoid_forward tanh tanh_ _prelu_kernel",
    "clamp clamp_ clamp_min clamp_max exp exp_ log log_ sqrt sqrt_ rsqrt sin cos erf abs neg",
    "sign square reciprocal pow pow_ add add_ sub sub_ rsub mul mul_ div div_ addcmul addcmul_",
    "addcdiv maximum minimum where lerp gt lt ge le eq ne logical_not logical_and bitwise_not",
    "masked_fill masked_fill_ clone copy_ contiguous _to_copy empty_like zeros_like ones_like",
    "full_like",
)
# Along one dimension, which is not the batch's where it is named; or along the last ones, of sizes
# that they are given as numbers, which the batch's is not.
_ALONG = _names("_softmax _log_softmax _safe_softmax native_layer_norm _fused_rms_norm")
# Whatever their arguments, these treat every row of the first dimension by itself, or leave the
# rows in their order, so a sample may have several.
_ROW_BY_ROW = _names(
    "convolution cudnn_convolution mkldnn_convolution slow_conv2d_forward",
    "addmm mm linear bmm baddbmm embedding native_group_norm",
    "max_pool2d_with_indices max_pool max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d",
    "adaptive_max_pool2d adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d",
    "upsample_nearest1d upsample_nearest2d upsample_bilinear2d pixel_shuffle pixel_unshuffle",
)
# What a dropout draws, row by row and for all slices at once. Whether it is one's, a trace does not
# say: whoever asks knows the modules.
_DRAWS = _names("bernoulli_ native_dropout")
# These may take away, join or part rows, or give them another place. With one row a sample the
# result shows it: a batch that was summed over or parted is not there any more in the next op.
_MOVING = _names(
    "cat stack flatten sum mean amax amin max min var var_mean std norm linalg_vector_norm",
)
# Of the first dimension sample by sample, but not row by row.
_FIRST = _names(
    "constant_pad_nd reflection_pad2d replication_pad2d im2col col2im",
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
_ANYWHERE = _ELEMENTWISE | _ALONG | _MOVING
_FOLDED = _ELEMENTWISE | _ALONG | _ROW_BY_ROW | _DRAWS
_NORMS = _names(
    "native_batch_norm cudnn_batch_norm _native_batch_norm_legit _batch_norm_with_update"
)
_APART = _ANYWHERE | _ROW_BY_ROW | _DRAWS | _FIRST | _NORMS
# {one} is a sample or a token, {all} is all of them.
_GIVEN_BACK = "gives each {one} back what backward has summed up over all"
_NOT_FIRST = "does not have the {all} in the {nth} dimension of what it reads"
_ACROSS = (
    "acts across {one}s, is given a number that comes from how many there are, or does not have "
    "them in their order along one dimension of what it reads"
)
_ELSEWHERE = "is not known to act on each {one} by itself where it has them in what it reads"
_NTH = ("first", "second")


def mixing(trace: Trace, section: Section) -> tuple[str, ...]:
    """Reasons why ``section`` may not run in slices, from what its ops do to the batch.

    Parameters
    ----------
    trace
        With `Op.batch_dims` of what the section cuts, see `belady.measure.batch`.

    Returns
    -------
    tuple
        Empty if every op is known to act on each sample (token) by itself, or is a batch norm.
    """
    along = section.along
    passes = [forward_ops(trace, section, index) for index in range(len(trace.roots))]
    found = [(at, reason) for ops in passes for at, reason in _reasons(trace, ops, along)]
    if not found:
        found = [(at, _GIVEN_BACK) for ops in passes for at in _given_back(trace, ops)]
    words = {"one": section.unit, "all": section.whole, "nth": _NTH[min(along, 1)]}
    return tuple(f"{trace.locate(at)} {reason.format_map(words)}" for at, reason in found)


def _reasons(trace: Trace, ops: tuple[int, ...], along: int) -> Iterator[tuple[int, str]]:
    if not ops:
        return
    # Values that carry samples: all that comes from before with some, and what it makes.
    given = brought(trace, ops)
    carrying = set(given)
    for at in ops:
        op = trace.ops[at]
        samples = [value in carrying for value in op.reads]
        dependent = any(samples) or any(dim is not None for dim in op.batch_dims)
        if dependent:
            carrying.update(op.writes)
        reason = _reason(op, dependent, samples, along)
        if not reason and not _in_place(op, given, along):
            reason = f"is the first to read what goes in, and {_NOT_FIRST}"
        given.difference_update(op.reads)
        if reason:
            yield at, reason
    made = {
        value
        for at in ops
        for value in carrying.intersection(trace.ops[at].writes)
        if not trace.storages[trace.values[value].storage].persistent
    }
    yield from _put_together(trace, ops, made, along)


def _put_together(
    trace: Trace, ops: tuple[int, ...], made: set[int], along: int
) -> Iterator[tuple[int, str]]:
    """The first op after the section that reads what it ``made``, if that is not in order."""
    for at in range(ops[-1] + 1, len(trace.ops)):
        op = trace.ops[at]
        if op.phase is Phase.BACKWARD:
            return
        if made.intersection(op.reads):
            if not _in_place(op, made, along):
                yield at, f"reads what comes out, and {_NOT_FIRST}"
            return


def _in_place(op: Op, values: set[int], along: int) -> bool:
    """Whether an op has what is cut in dimension ``along`` of those of ``values`` that it reads."""
    if values.isdisjoint(op.reads):
        return True
    if len(op.batch_dims) != len(op.reads):
        return set(op.batch_dims) == {along}
    pairs = zip(op.reads, op.batch_dims, strict=True)
    return all(dim == along for value, dim in pairs if value in values)


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
    return op.name.removeprefix("aten.").removeprefix("belady.").split(".")[0]


def _reason(op: Op, dependent: bool, samples: list[bool], along: int) -> str:
    name = _name(op)
    if op.random and name not in _DRAWS:
        return "draws random numbers, and slices would draw others than the {all}"
    if op.communicates:
        return "communicates"
    if not dependent:
        return ""
    view = name in _VIEWS and not op.writes
    if name not in _APART and not view:
        return "is not known to act on each {one} by itself"
    if not op.batch_dims:
        return "has operands of which the dimension of the {all} is not known"
    reason = "" if view else _misplaced(name, set(op.batch_dims) - {None}, along)
    return reason or _whole(op, samples)


def _misplaced(name: str, dims: set[int | None], along: int) -> str:
    if SPREAD in dims:
        return _ACROSS
    if along and name in _DRAWS:
        # For all slices at once, laid out as what goes in.
        return "" if dims <= {along} else _NOT_FIRST
    if dims == {FOLDED}:
        if name not in _FOLDED:
            return "is not known to act on each row by itself, and a {one} has several"
    elif len(dims) > 1 or (dims - {0} and name not in _ANYWHERE):
        return _ELSEWHERE if along else _NOT_FIRST
    return ""


def _whole(op: Op, samples: list[bool]) -> str:
    if len(op.batch_dims) != len(samples):
        # A value that is read in several ways stands once among the reads.
        whole = None in op.batch_dims
    else:
        known = zip(samples, op.batch_dims, strict=True)
        whole = any(carries and dim is None for carries, dim in known)
    return "reads what comes from all {one}s, or has no dimension of the {all}" if whole else ""
