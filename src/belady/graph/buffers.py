"""Buffers that forward updates: written in one call, where tracing has one for each.

A network of 155 norms has 310 of them; each call is a launch, and it is these that such a network
waits for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import fx

from belady.graph.doors import fake_value, is_forward
from belady.memory.geometry import steps_of

_COPY, _COPY_ALL = torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default


def update_together(joint: fx.GraphModule) -> None:
    """Have inputs that are written one after another written at once, with the same bits.

    Parameters
    ----------
    joint
        A joint graph. It is changed.
    """
    several = [copies for copies in _alike(joint.graph) if len(copies) > 1]
    for copies in several:
        _write(copies)
    if several:
        joint.recompile()


def _alike(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Stretches of the graph that do nothing but write to inputs, apart by what one call can do."""
    for written, run in groupby([*graph.nodes], _writes):
        copies = [*run]
        if written and len({copy.args[0] for copy in copies}) == len(copies):
            found = defaultdict[Any, list[fx.Node]](list)
            for copy in copies:
                held, made = (it.meta["val"] for it in copy.all_input_nodes)
                found[held.dtype, held.device, made.device, is_forward(copy)].append(copy)
            yield from found.values()


def _writes(node: fx.Node) -> bool:
    if node.target is not _COPY or node.users or len(node.args) != 2 or node.kwargs:
        return False
    target, source = node.args
    if not isinstance(target, fx.Node) or target.op != "placeholder" or target is source:
        return False
    held, made = fake_value(target), fake_value(source)  # type: ignore[arg-type]
    return held.dtype is made.dtype and steps_of(held) == steps_of(made)


def _write(copies: Sequence[fx.Node]) -> None:
    """Put one call in the place of the last of ``copies``."""
    last = copies[-1]
    held, made = zip(*(copy.args for copy in copies), strict=True)
    with last.graph.inserting_after(last):
        node = last.graph.call_function(_COPY_ALL, ([*held], [*made]))
    node.meta = {**last.meta, "val": ()}
    node.meta.pop("tensor_meta", None)
    for copy in copies:
        copy.graph.erase_node(copy)
