"""The parts of a call of a graph, as they are observed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from belady.graph.captured import Captured
from belady.graph.parts import Part
from belady.graph.watching import Lasting, Names


def part_of(
    graph: Captured, call: int, args: Sequence[Any], names: Names, lasting: Lasting
) -> Part:
    """The forward of a call with ``args``."""
    if graph.joint is None:
        raise RuntimeError("a graph that was not cut cannot be called")
    inputs = [names.of(arg) for arg in args]
    found = Part(call, graph.name, graph.joint, graph.layout, True, inputs, lasting.kinds)
    found.modules = lasting.paths.of(graph, graph.joint, args)
    return found


def backward_of(
    graph: Captured, call: int, args: Sequence[Any], names: Names, lasting: Lasting
) -> Part:
    """The backward of a call, given ``args``."""
    if graph.joint is None:
        raise RuntimeError("a graph that was not cut has no backward of ours")
    inputs = [names.of(arg) for arg in args]
    return Part(call, graph.name, graph.joint, graph.layout, False, inputs, lasting.kinds)
