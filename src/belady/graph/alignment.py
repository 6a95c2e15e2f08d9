"""Matrix products whose sizes suit no fast kernel, made with sizes that do.

Tensor cores take rows that begin at multiples of 16 bytes. A vocabulary of 50,257 has none: three
products of GPT-2's head take an H100 42 ms in bfloat16, where all kernels take 162. Inductor pads
operands, too, where it sees a whole graph (``torch._inductor.fx_passes.pad_mm``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

from belady.graph.doors import fake_value, is_forward

_aten = torch.ops.aten
_DEVICES = frozenset({"cuda"})
_HALVES = frozenset({torch.float16, torch.bfloat16})
# Elements of two bytes in 16.
_WHOLE = 8
# Operations for each element that is read or written, at least. With fewer the memory is what takes
# the time, and of an H100 that of copies beside it.
_WORTH = 256
# Of the budget, the part that a copy may take at most.
_PART = 8
_SWAPS = {_aten.t.default: (), _aten.transpose.int: (0, 1), _aten.permute.default: ([1, 0],)}


def align(joint: fx.GraphModule, budget_bytes: int) -> int:
    """Pad the operands of large products of half precision; gives how many products.

    Results can differ by rounding, since other kernels run. They lie as they did.

    Parameters
    ----------
    joint
        A joint graph. It is changed.
    budget_bytes
        What it may hold; a product stays of which a copy would take much of that.
    """
    mode = detect_fake_mode([fake_value(node) for node in joint.graph.nodes])
    padded, writing = 0, _Writing(joint.graph)
    for product in joint.graph.find_nodes(op="call_function", target=_aten.mm.default):
        left, right = map(fake_value, product.args)
        largest = max(it.nbytes for it in (left, right, fake_value(product)))
        pads = _pads(left, right) if _PART * largest <= budget_bytes else None
        if pads is not None and mode is not None:
            with mode, torch.no_grad():
                writing.replace(product, *pads)
            padded += 1
    if padded:
        joint.recompile()
    return padded


def _pads(left: torch.Tensor, right: torch.Tensor) -> tuple[int, int, int] | None:
    """What to add to rows of ``left``, to what is summed over, and to columns of ``right``.

    Only a size along which an operand or the result lies in one piece can matter.
    """
    rows, inner = left.shape
    columns = right.shape[1]
    if left.dtype not in _HALVES or left.device.type not in _DEVICES:
        return None
    lie_along_rows = left.stride(0) == 1 != left.stride(1)
    lie_along_inner = left.stride(1) == 1 or right.stride(0) == 1
    more = -rows % _WHOLE if lie_along_rows else 0
    deeper = -inner % _WHOLE if lie_along_inner else 0
    wider = -columns % _WHOLE
    if not (more or deeper or wider):
        return None
    elements = rows * inner + inner * columns + rows * columns
    worth = 2 * rows * inner * columns > _WORTH * elements
    return (more, deeper, wider) if worth else None


class _Writing:
    """Writes products into a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        # Of forward and of backward, each by itself: what is padded does not wait for backward.
        self._padded: dict[tuple[fx.Node, int, int, bool], fx.Node] = {}

    def replace(self, product: fx.Node, more: int, deeper: int, wider: int) -> None:
        """Put a product of padded operands, without the padding, in the place of ``product``."""
        left, right = product.args
        size = fake_value(product).shape
        with self._graph.inserting_before(product):
            left = self._pad(product, left, more, deeper)
            right = self._pad(product, right, deeper, wider)
            made = self._call(product, _aten.mm.default, left, right)
            for dim in (dim for dim, given in enumerate((more, wider)) if given):
                made = self._call(product, _aten.slice.Tensor, made, dim, 0, size[dim])
            if more or wider:
                options = {"memory_format": torch.contiguous_format}
                made = self._call(product, _aten.clone.default, made, **options)
        # It lies as the product did; what shows it was traced on the bytes of that.
        made.meta["val"] = fake_value(product)
        turned = [node for node in product.all_input_nodes if node.target in _SWAPS]
        product.replace_all_uses_with(made)
        for node in (product, *turned):
            if not node.users:
                self._graph.erase_node(node)

    def _pad(self, product: fx.Node, operand: Any, rows: int, columns: int) -> fx.Node:
        if not (rows or columns):
            return operand  # type: ignore[no-any-return]
        value = fake_value(operand)
        swapped = value.stride(0) == 1 != value.stride(1)
        # Padded as it lies: a copy that turns it round would take longer.
        whole = self._turned(product, operand) if swapped else operand
        below, beside = (columns, rows) if swapped else (rows, columns)
        name = whole, below, beside, is_forward(product)
        if name not in self._padded:
            sizes = [0, beside, 0, below]
            self._padded[name] = self._call(product, _aten.constant_pad_nd.default, whole, sizes)
        found = self._padded[name]
        return self._call(product, _aten.t.default, found) if swapped else found

    def _turned(self, product: fx.Node, operand: fx.Node) -> fx.Node:
        """Rows of ``operand`` as columns; what it was turned from, if that is so."""
        if operand.target in _SWAPS and operand.args[1:] == _SWAPS[operand.target]:
            return operand.args[0]  # type: ignore[return-value]
        return self._call(product, _aten.t.default, operand)

    def _call(self, product: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self._graph.call_function(target, args, kwargs)
        node.meta = {**product.meta}
        values = fx.node.map_arg((args, kwargs), fake_value)
        node.meta["val"] = target(*values[0], **values[1])
        node.meta.pop("tensor_meta", None)
        return node
