"""Which saved values can be held in fewer bytes on the device, and what that costs.

Gist (Jain et al., ISCA 2018, section IV) found that the backward of a ReLU asks for the sign of its
result alone, and that of a pooling for nothing of its input. So where nothing else reads it, such a
result is held in one bit an element (its *Binarize*). Masks take a bit instead of a byte. Where in
its plane a pooling found its largest number is an int64 that fits into fewer bytes, which the size
of the plane tells: no value is looked at.
"""

from __future__ import annotations

from math import prod

from belady.ir.codecs import BITS, NARROW, SIGN, Encoding
from belady.ir.residency import times_saved
from belady.ir.trace import Need, Phase, Save, Source, Trace

_FLOATS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_RELUS = frozenset({"aten.relu.default", "aten.relu_.default"})
# Poolings: where their gradient goes, their indices or their geometry say.
POOLINGS = frozenset(
    f"aten.{name}.default"
    for name in (
        *("max_pool2d_with_indices", "max_pool3d_with_indices"),
        *("adaptive_max_pool2d", "adaptive_max_pool3d", "avg_pool2d", "avg_pool3d"),
        *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d"),
    )
)
# Ops whose nodes ask no more than the sign of what they save.
_SAVING = _RELUS | POOLINGS
# Those whose second result says where, and how many dimensions of the input it counts through.
_INDEXED = {
    "aten.max_pool2d_with_indices.default": 2,
    "aten.max_pool3d_with_indices.default": 3,
    "aten.adaptive_max_pool2d.default": 2,
    "aten.adaptive_max_pool3d.default": 3,
}
# Ops whose bools are bytes of 0 and 1. Bools on bytes that something else wrote may be others.
_MASKS = frozenset(
    {
        *("gt", "ge", "lt", "le", "eq", "ne", "isnan", "isinf", "native_dropout"),
        *("logical_and", "logical_or", "logical_xor", "logical_not"),
    }
)
_INT64 = 8


def encoding_of(trace: Trace, index: int) -> Encoding | None:
    """The smallest encoding of value ``index`` that backward can do with; None if there is none.

    In an eager trace there are some only where ops are replayable: only then is what the program
    calls compared, iteration by iteration, with what it called when it was observed, and another
    call could save what does not fit into the encoding.
    """
    value, storage = trace.values[index], trace.storages[trace.values[index].storage]
    others = (other for other in trace.contents[value.storage] if other != index)
    if (
        storage.persistent
        or not trace.followed
        or value.producer < 0
        or value.first_read is None
        or any(trace.values[other].saves for other in others)
        or len([*times_saved(value)]) > 1
        or len({save.dtype for save in value.saves}) > 1
    ):
        return None
    dtype = value.saves[0].dtype
    if dtype in _FLOATS and _asked_for_signs(trace, index):
        return _smaller(SIGN, -(-storage.nbytes // (8 * _FLOATS[dtype])), storage.nbytes)
    if dtype == "bool" and trace.ops[value.producer].name.split(".")[1] in _MASKS:
        return _smaller(BITS, -(-storage.nbytes // 8), storage.nbytes)
    if dtype == "int64" and (places := _places(trace, index)):
        for codec, (itemsize, most) in NARROW.items():
            if places <= most:
                return _smaller(codec, storage.nbytes // _INT64 * itemsize, storage.nbytes)
    return None


def _smaller(codec: str, nbytes: int, before: int) -> Encoding | None:
    return Encoding(codec, nbytes) if nbytes < before else None


def _asked_for_signs(trace: Trace, index: int) -> bool:
    """Whether all that backward does with the result of a ReLU is to ask for signs or its shape.

    An op in backward that reads it must stand at each boundary at which autograd takes it back:
    what reads it behind the dispatcher's back is then no other node than those. And only such nodes
    may have saved it: one in a branch that the loss leaves out today may be in it tomorrow, and
    forward would not show that.
    """
    value = trace.values[index]
    if trace.ops[value.producer].name not in _RELUS or not _saved_by_producer(trace, index):
        return False
    later = [use for use in value.uses if trace.ops[use.op].phase is Phase.BACKWARD]
    # Handed on as a gradient it would live longer, as other numbers.
    until = max([trace.last_drops[value.storage], *(use.op + 1 for use in later)])
    reads = {read for save in value.saves for read in save.reads}
    # What a graph reads is in its code.
    fixed = trace.source is Source.GRAPH
    return (
        all(fixed or (save.reads and trace.ops[save.op].name in _SAVING) for save in value.saves)
        and all(use.need is not Need.VALUES for use in later)
        and reads <= {use.op for use in later}
        and trace.storages[value.storage].death <= until
    )


def _saved_by_producer(trace: Trace, index: int) -> bool:
    """Whether the op that makes the value saves it: then it is that op's node that reads it.

    A graph's code is fixed, so there it does not matter who saves.
    """
    value = trace.values[index]
    own = (not save.as_input and save.op == value.producer for save in value.saves)
    return trace.source is Source.GRAPH or any(own)


def _places(trace: Trace, index: int) -> int:
    """How many places value ``index``, the indices of a pooling, can name; 0 if it is none."""
    producer = trace.values[index].producer
    dims = _INDEXED.get(trace.ops[producer].name)
    if dims is None or not _saved_by_producer(trace, index):
        return 0
    shapes = [save.shape for save in _inputs_saved(trace, producer)]
    return prod(shapes[0][-dims:]) if shapes else 0


def _inputs_saved(trace: Trace, op: int) -> list[Save]:
    read = set(trace.ops[op].reads)
    saves = (save for value in sorted(read) for save in trace.values[value].saves)
    return [save for save in saves if save.op == op and save.as_input]
