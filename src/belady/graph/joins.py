"""Slices that are joined as they come: a graph says that all are there first."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from belady.graph.doors import fake_value, is_forward


def _put(whole: torch.Tensor, part: torch.Tensor, start: int) -> torch.Tensor:
    whole.narrow(0, start, part.shape[0]).copy_(part)
    return whole


def _begun(part: torch.Tensor, size: list[int], stride: list[int], start: int) -> torch.Tensor:
    return _put(part.new_empty_strided(size, stride), part, start)


torch.library.define(
    "belady::begun", "(Tensor part, int[] size, int[] stride, int start) -> Tensor"
)
torch.library.impl("belady::begun", "default", _begun)
torch.library.define("belady::put", "(Tensor(a!) whole, Tensor part, int start) -> Tensor(a!)")
torch.library.impl("belady::put", "default", _put)


def join_as_they_come(module: fx.GraphModule) -> None:
    """Have what is joined along the first dimension written to its place when it is made.

    Joined at the end, all slices would be there beside the whole.
    """
    for joined in module.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
        parts = joined.args[0]
        dim = joined.args[1] if len(joined.args) > 1 else joined.kwargs.get("dim", 0)
        if dim == 0 and _come_apart(joined, parts):
            _join(joined, parts)


def _come_apart(joined: fx.Node, parts: Any) -> bool:
    """Whether what is joined are results of ops, each one's own, of the same part of the graph."""
    return len({*parts}) == len(parts) > 1 and all(
        part.op == "call_function"
        and is_forward(part) == is_forward(joined)
        and fake_value(part).dtype == fake_value(joined).dtype
        and fake_value(part).dim() == fake_value(joined).dim()
        for part in parts
    )


def _join(joined: fx.Node, parts: Any) -> None:
    whole, graph, starts, start = fake_value(joined), joined.graph, {}, 0
    for part in parts:
        starts[part] = start
        start += fake_value(part).shape[0]
    order = {node: place for place, node in enumerate(graph.nodes)}
    latest: fx.Node | None = None
    for part in sorted(parts, key=order.__getitem__):
        with graph.inserting_after(part):
            if latest is None:
                args: Any = (part, list(whole.shape), list(whole.stride()), starts[part])
                latest = graph.call_function(torch.ops.belady.begun.default, args)
            else:
                args = (latest, part, starts[part])
                latest = graph.call_function(torch.ops.belady.put.default, args)
        # The same tensor without bytes: so they lie on one storage.
        latest.meta = dict(joined.meta)
    assert latest is not None
    joined.replace_all_uses_with(latest)
    graph.erase_node(joined)
