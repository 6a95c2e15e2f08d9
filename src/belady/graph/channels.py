"""Convolutions of images whose channels lie last in a graph whose model laid them first.

The kernels of tensor cores take channels last, and cuDNN turns round what lies otherwise. Inductor
lays out a whole graph that way (``layout_optimization``); of parts of one, which begin and end as
the graph says, it could turn each round by itself. So the graph is laid out before it is cut.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.utils._pytree import tree_leaves

from belady.graph.doors import fake_value
from belady.graph.ops import is_pointwise
from belady.memory.geometry import steps_of

_aten = torch.ops.aten
_FIRST, _LAST = torch.contiguous_format, torch.channels_last
# Places of the operands that lie alike.
_CONVOLUTIONS = {
    _aten.convolution.default: (0, 1),
    _aten.convolution_backward.default: (0, 1, 2),
}
# What gives the same numbers however its operands lie, beside what is pointwise, and whose results
# lie as they do without bytes, if its images lie alike. A `view` that would have to copy raises.
_WORDS = (
    "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward _batch_norm_with_update_functional "
    "_log_softmax _log_softmax_backward_data _native_batch_norm_legit "
    "_native_batch_norm_legit_functional _prelu_kernel_backward _softmax _softmax_backward_data "
    "_unsafe_view adaptive_max_pool2d adaptive_max_pool2d_backward addmm alias amax any "
    "avg_pool2d avg_pool2d_backward baddbmm batch_norm_backward bmm cat constant_pad_nd copy "
    "copy_ cudnn_batch_norm cudnn_batch_norm_backward detach empty_like expand flip full_like "
    "gather index_select log_sigmoid_backward log_sigmoid_forward max max_pool2d_with_indices "
    "max_pool2d_with_indices_backward mean min mm native_batch_norm native_batch_norm_backward "
    "native_layer_norm native_layer_norm_backward new_zeros ones_like permute roll select "
    "select_backward slice slice_backward split split_with_sizes squeeze sum t transpose "
    "unsqueeze upsample_bicubic2d upsample_bicubic2d_backward upsample_bilinear2d "
    "upsample_bilinear2d_backward upsample_nearest2d upsample_nearest2d_backward var_mean view "
    "zeros_like"
)
_ALIKE = frozenset(_WORDS.split())


def lay_channels_last(joint: fx.GraphModule) -> bool:
    """Have convolutions of images take and give channels last; gives whether any does that newly.

    What the graph takes and returns lies as it did. Results can differ by rounding, since other
    kernels run; random numbers fall where they fell.

    Parameters
    ----------
    joint
        A joint graph. It is changed.
    """
    mode = detect_fake_mode([fake_value(node) for node in joint.graph.nodes])
    laying = _Laying()
    if mode is None:
        return False
    with mode, torch.no_grad(), torch._C._DisableAutocast():
        laid = all(laying.takes(node) for node in joint.graph.nodes) and laying.copies_any
    if laid:
        laying.write()
        joint.recompile()
    return laid


class _Laying:
    """How every node will lie, worked out before anything of the graph is changed."""

    def __init__(self) -> None:
        # By node and how they lie: one for all that read it.
        self._copies: dict[tuple[fx.Node, torch.memory_format], torch.Tensor] = {}
        self._values: dict[fx.Node, Any] = {}
        self._read: dict[fx.Node, dict[fx.Node, torch.memory_format]] = {}

    @property
    def copies_any(self) -> bool:
        """Whether anything is read that lies otherwise than it did."""
        return any(self._read.values())

    def takes(self, node: fx.Node) -> bool:
        """Work out what a node reads and gives; False where the graph cannot be laid out so."""
        if node.op == "output":
            moved = self._moved(node.all_input_nodes)
            return self._reads(node, {it: _format(fake_value(it)) for it in moved})
        if node.op != "call_function":
            return True
        alike = node.target in _CONVOLUTIONS or _is_alike(node.target)
        if alike and self._makes(node, self._last(node)):
            return True
        return self._makes(node, self._first(node))

    def write(self) -> None:
        """Change the graph."""
        for node, value in self._values.items():
            node.meta["val"] = value
            node.meta.pop("tensor_meta", None)
        made: dict[tuple[fx.Node, torch.memory_format], fx.Node] = {}
        for user, read in self._read.items():
            for source, to in read.items():
                if (source, to) not in made:
                    made[source, to] = self._copy(user, source, to)
                user.replace_input_with(source, made[source, to])

    def _copy(self, user: fx.Node, source: fx.Node, to: torch.memory_format) -> fx.Node:
        # What is returned is copied as soon as it is made.
        returned = user.op == "output"
        graph = source.graph
        at = graph.inserting_after(source) if returned else graph.inserting_before(user)
        with at:
            node = graph.call_function(_aten.clone.default, (source,), {"memory_format": to})
        node.meta = {**(source if returned else user).meta, "val": self._copies[source, to]}
        node.meta.pop("tensor_meta", None)
        return node

    def _last(self, node: fx.Node) -> dict[fx.Node, torch.memory_format | None]:
        """What a node reads that does not lie with channels last, and is to.

        Images of a convolution; and those of another operator, if some of them do: how what it
        gives lies then is not always how it does without bytes.
        """
        places = _CONVOLUTIONS.get(node.target)  # type: ignore[call-overload]
        read = node.all_input_nodes if places is None else [node.args[it] for it in places]
        others = [it for it in read if _is_image(self._value(it)) and not self._is_last(it)]
        if places is None and (is_pointwise(node.target) or not any(map(self._is_last, read))):
            return {}
        return dict.fromkeys(others, _LAST)

    def _first(self, node: fx.Node) -> dict[fx.Node, torch.memory_format | None]:
        """What a node reads that would lie otherwise than it did, as it did."""
        return {
            it: _FIRST if fake_value(it).is_contiguous() else None
            for it in self._moved(node.all_input_nodes)
        }

    def _moved(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return [
            it
            for it in nodes
            if isinstance(self._values.get(it), torch.Tensor)
            and steps_of(self._values[it]) != steps_of(fake_value(it))
        ]

    def _makes(self, node: fx.Node, read: Mapping[fx.Node, torch.memory_format | None]) -> bool:
        """Work out what a node gives, from copies of what ``read`` names."""
        inputs = node.all_input_nodes
        if not read and not any(it in self._values for it in inputs):
            return True
        if not self._reads(node, read):
            return False
        values = {it: self._value(it) for it in inputs}
        values |= {it: self._copies[it, to] for it, to in self._read[node].items()}
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        try:
            self._values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # such as a view of what does not lie in one piece
            return False
        return _alike(self._values[node], fake_value(node))

    def _reads(self, node: fx.Node, read: Mapping[fx.Node, torch.memory_format | None]) -> bool:
        """Have copies of what ``read`` names; False where one has no format that is known."""
        wanted = {it: to for it, to in read.items() if to is not None}
        for it, to in wanted.items():
            if (it, to) not in self._copies:
                self._copies[it, to] = self._value(it).clone(memory_format=to)
        self._read[node] = wanted
        return len(wanted) == len(read)

    def _is_last(self, node: Any) -> bool:
        """Whether an image lies with channels last, if it is one."""
        value = self._value(node)
        return _is_image(value) and value.is_contiguous(memory_format=_LAST)

    def _value(self, node: Any) -> Any:
        return self._values.get(node, fake_value(node))


def _is_image(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 4


def _format(value: torch.Tensor) -> torch.memory_format | None:
    """The format that gives a copy of a tensor, without gaps, the strides of its own."""
    if value.is_contiguous():
        return _FIRST
    images = value.dim() == 4 and value.is_contiguous(memory_format=_LAST)
    return _LAST if images else None


def _is_alike(target: Any) -> bool:
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return is_pointwise(target) or target.overloadpacket.__name__ in _ALIKE


def _alike(value: Any, before: Any) -> bool:
    """Whether two results are the same but for how they lie."""
    pairs = zip(tree_leaves(value), tree_leaves(before), strict=True)
    return all(
        mine.shape == theirs.shape and mine.dtype is theirs.dtype
        for mine, theirs in pairs
        if isinstance(theirs, torch.Tensor)
    )
