"""Counters of batches, to which a graph adds one and which it does not read: all in one call.

Every norm over the batch has one. A graph would add to each out of place, return the sums, and
AOTAutograd copy each back: more work than a relu for a host that issues ops more slowly than a
device runs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from belady.graph.doors import beneath_functions

Run = Callable[..., Any]


class Counters:
    """The additions that were taken out of what Dynamo captured.

    An input is taken that is a number by itself, and of which nothing else is read or written in
    the graph.

    Parameters
    ----------
    module
        It is changed.
    inputs
        What it is captured for, by number.

    Attributes
    ----------
    numbers
        Of the inputs that it added one to.
    """

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._module = module
        found = dict(_additions(module, inputs))
        self.numbers = tuple(found.values())
        # What each adds to, and before what, in order.
        inside = [node for node in module.graph.nodes if node in found]
        self._erased = [(node.args, _follower(node, found)) for node in inside]
        for node in found:
            module.graph.erase_node(node)
        if found:
            module.recompile()

    def put_back(self) -> None:
        """Have the module add, wherever it did: of a call that fails, plain PyTorch counts some."""
        for args, follower in self._erased:
            with self._module.graph.inserting_before(follower):
                self._module.graph.call_method("add_", args)
        if self._erased:
            self._module.recompile()

    def counting(self, run: Run) -> Run:
        """``run``, and one added to these of its arguments when it has come to its end."""
        numbers = self.numbers
        if not numbers:
            return run

        def counted(*args: Any) -> Any:
            results = run(*args)
            with beneath_functions():
                torch._foreach_add_([args[number] for number in numbers], 1)
            return results

        return counted


def _additions(module: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[tuple[fx.Node, int]]:
    """What adds one to a counter, and the counter's number."""
    places = [node for node in module.graph.nodes if node.op == "placeholder"]
    lie_on = Counter(_storage(it) for it in inputs if _is_plain(it))
    for number, (place, value) in enumerate(zip(places, inputs, strict=True)):
        if _is_number(value) and lie_on[_storage(value)] == 1 and len(place.users) == 1:
            (node,) = place.users
            if _adds_one(node, place):
                yield node, number


def _follower(node: fx.Node, erased: Container[fx.Node]) -> fx.Node:
    """The first node behind one that stays."""
    while node in erased:
        node = node.next
    return node


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _is_number(value: Any) -> bool:
    return _is_plain(value) and value.dtype is torch.int64 and value.dim() == 0


def _storage(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _adds_one(node: fx.Node, to: fx.Node) -> bool:
    """Whether that is all that a node does, and nobody asks for the sum."""
    called = node.op == "call_method" and node.target == "add_"
    return called and node.args == (to, 1) and not node.kwargs and not node.users
