"""Runs of ops between movements, each as one call: fusion stays inside them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from belady.graph import ops
from belady.graph.code import Called, Code, Does, Line
from belady.graph.doors import fake_value
from belady.graph.joint import Step
from belady.graph.layout import Layout
from belady.graph.ops import POOLED, is_fused, name_of
from belady.graph.replays import (
    FROM_MASK,
    FROM_STATISTICS,
    from_mask,
    from_statistics,
    norm_again,
)

# Makes one callable of a graph and of its inputs as tensors without bytes; None: it cannot.
Fuse = Callable[[fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Sequence[Any]] | None]

# What the names of a graph's inputs begin with: of those whose bytes go with their last use in it,
# and of the others.
GOES, STAYS = "goes", "stays"

# What no compiler knows, or would round otherwise, and what it gets instead.
_INSTEAD: dict[Any, Callable[..., Any]] = {
    FROM_STATISTICS: from_statistics,
    FROM_MASK: from_mask,
}


def fused(code: Code, layout: Layout, fuse: Fuse) -> None:
    """Replace runs of ops in ``code`` by calls of what ``fuse`` makes of them.

    What goes in and out of a run are the results of ops; what only shows their bytes is made again
    beside it where somebody else needs it, so storages are those of the trace. Inputs go as soon
    as the run has read them.
    """
    lines: list[Line] = []
    later = _read_later(code.lines)
    holders = _holders(code.lines, layout)
    for start, stop in _runs(code.lines, layout):
        run = code.lines[start:stop]
        steps = [it.called.step for it in run if it.called is not None]
        made = None
        if _fits(run[0].called, layout) and any(layout.is_op(it) and _is_made(it) for it in steps):
            read = {name for line in run for name in line.reads}
            gone = {it for it in read & holders.keys() if not holders[it] & later[stop]}
            made = _replaced(code, run, layout, later[stop], gone, fuse)
        lines += run if made is None else made
    code.lines[:] = lines


def _runs(lines: Sequence[Line], layout: Layout) -> Iterator[tuple[int, int]]:
    """Stretches of lines: those that may be fused, and each other line alone."""
    start = 0
    while start < len(lines):
        stop = start
        while stop < len(lines) and _fits(lines[stop].called, layout):
            stop += 1
        yield start, max(stop, start + 1)
        start = max(stop, start + 1)


def _fits(called: Called | None, layout: Layout) -> bool:
    """Whether a line calls something that gives the same wherever it stands among others.

    Where memory is scarce calls of libraries stand alone: what is between two of them is a kernel
    or two, while of a longer run a compiler may make values long before they are read.
    """
    if called is None or (called.scarce and not _is_made(called.step)):
        return False
    step = called.step
    known = {node.op for node in step.inputs}
    return (
        (step.node.target is norm_again or _is_plain(step, layout))
        and "get_attr" not in known
        and all(layout.is_here(node) for node in (*step.inputs, *step.made))
    )


def _is_made(step: Step) -> bool:
    """Whether a compiler makes the kernel of a step, instead of calling a library's."""
    return step.node.target is norm_again or is_fused(name_of(step))


def _is_plain(step: Step, layout: Layout) -> bool:
    target = step.node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and (target.namespace == "aten" or str(target) in POOLED)
        and not ops.is_random(step)
        and not layout.writes_to(step)
    )


def _read_later(lines: Sequence[Line]) -> list[set[str]]:
    """For each line, the names that it and those after it read."""
    found: list[set[str]] = [set()]
    for line in reversed(lines):
        found.append(found[-1] | set(line.reads))
    return found[::-1]


def _holders(lines: Sequence[Line], layout: Layout) -> dict[str, set[str]]:
    """The names that hold the bytes of each name; without what a graph is given: others hold it."""
    outside = {
        storage for node, storage in layout.storage_of.items() if node.op == "placeholder"
    } | {None}
    holders: dict[str, set[str]] = {}
    first: dict[int | None, str] = {}
    given: set[str] = set()

    def join(names: Sequence[str]) -> None:
        joined = set(names).union(*(holders.get(name, ()) for name in names))
        holders.update(dict.fromkeys(joined, joined))

    for line in lines:
        if line.called is None:
            # What moves a value holds its bytes, and gives them.
            join((*line.reads, *line.binds) if line.reads and line.binds else ())
            continue
        for node, name in line.called.names.items():
            storage = layout.storage_of.get(node)
            if storage in outside:
                given.add(name)
            else:
                join((name, first.setdefault(storage, name)))
    return {name: names for name, names in holders.items() if name not in given}


def _replaced(
    code: Code,
    run: Sequence[Line],
    layout: Layout,
    later: set[str],
    gone: set[str],
    fuse: Fuse,
) -> list[Line] | None:
    """The lines that stand for a run."""
    wanted, views = set(later), list[Line]()
    for line in reversed(run):
        assert line.called is not None
        if not layout.is_op(line.called.step) and wanted.intersection(line.binds):
            wanted.update(line.reads)
            views.append(line)
    results = [
        name
        for line in run
        if line.called is not None and layout.is_op(line.called.step)
        for name in line.binds
        if name in wanted
    ]
    if not results:
        return None
    module, names, fakes = _graph_of(run, results, gone)
    kernel = fuse(module, fakes)
    if kernel is None:
        return None
    given, call = f"given{len(code.constants)}", code.constant(kernel, "segment")
    targets = "".join(name + ", " for name in results)
    bound = {name for line in run for name in line.binds}
    # What a line only holds on to goes when the run is over.
    held = {name for line in run for name in line.reads} - bound - {*names}
    return [
        Line(f"{given} = [{', '.join(names)}]", tuple(names), (given,)),
        Line(
            f"{targets}= {call}({given})",
            (given, *sorted(held)),
            tuple(results),
            does=Does.MAKES,
        ),
        *reversed(views),
    ]


def _graph_of(
    run: Sequence[Line], results: Sequence[str], gone: set[str]
) -> tuple[fx.GraphModule, list[str], list[Any]]:
    """A run as a graph, the names of what it takes, and these as tensors without bytes."""
    graph, known = fx.Graph(), dict[str, fx.Node]()
    taken: dict[str, Any] = {}
    bound: set[str] = set()
    for line in run:
        assert line.called is not None
        for node in line.called.step.inputs:
            name = line.called.names[node]
            if name not in bound and name not in taken:
                # The same run of another block, or of another plan, is the same graph by its names.
                known[name] = graph.placeholder(f"{GOES if name in gone else STAYS}{len(taken)}")
                taken[name] = fake_value(node)
                known[name].meta["val"] = taken[name]
        bound.update(line.binds)
    for line in run:
        assert line.called is not None
        _call(graph, line.called, known)
    graph.output(tuple(known[name] for name in results))
    return fx.GraphModule({}, graph), list(taken), list(taken.values())


def _call(graph: fx.Graph, called: Called, known: dict[str, fx.Node]) -> None:
    step, names = called.step, called.names
    target: Any = _INSTEAD.get(step.node.target, step.node.target)

    def read(node: fx.Node) -> fx.Node:
        return known[names[node]]

    args = fx.map_arg(step.node.args, read)
    kwargs = fx.map_arg(step.node.kwargs, read)
    made = graph.call_function(target, args, kwargs)
    if not step.several:
        (result,) = step.made
        made.meta["val"] = fake_value(result)
        known[names[result]] = made
        return
    for place, node in enumerate(step.outputs):
        if node is not None:
            part = known[names[node]] = graph.call_function(operator.getitem, (made, place))
            part.meta["val"] = fake_value(node)
