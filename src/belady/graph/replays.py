"""What runs again, and from what, when a storage of forward is made again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from belady.graph.joint import Joint, Step
from belady.graph.layout import Layout

_aten = torch.ops.aten
_FUNCTIONAL_NORM = _aten._native_batch_norm_legit_functional.default
# The norms over a batch: they need no running statistics, and must not update them again.
_BATCH_NORMS = frozenset(
    {_FUNCTIONAL_NORM, _aten.native_batch_norm.default, _aten.cudnn_batch_norm.default}
)
_RUNNING, _TRAINING = (3, 4), 5


@dataclass(frozen=True, slots=True)
class Replay:
    """Steps that make a storage again.

    Attributes
    ----------
    storage
        What is made again.
    steps
        In order, views included.
    sources
        Nodes of forward that they start from.
    targets
        The nodes on the storage that backward reads, or that another replay starts from.
    """

    storage: int
    steps: tuple[Step, ...]
    sources: tuple[fx.Node, ...]
    targets: tuple[fx.Node, ...]


def replays_of(
    joint: Joint, layout: Layout, orders: Mapping[int, Iterable[Step]]
) -> dict[int, Replay]:
    """The replay of each storage in ``orders``, which runs as many of its ops as it needs.

    One that starts from a storage that is made again itself makes that one do so in time.
    """
    wanted = {storage: dict[fx.Node, None]() for storage in orders}
    for node in joint.crossing:
        storage = layout.storage_of.get(node, -1)
        if storage in wanted:
            wanted[storage][node] = None
    found: dict[int, Replay] = {}
    pending = [*orders]
    while pending:
        storage = pending.pop()
        replay = _replay_of(joint, layout, storage, orders[storage], wanted[storage])
        found[storage] = replay
        for node in replay.sources:
            behind = layout.storage_of.get(node, -1)
            if node not in wanted.get(behind, {node: None}):
                wanted[behind][node] = None
                pending.append(behind)
    return found


def _replay_of(
    joint: Joint, layout: Layout, storage: int, ops: Iterable[Step], targets: Iterable[fx.Node]
) -> Replay:
    chain = {node: step for step in ops for node in step.made}
    views = {n: s for s in joint.forward if not layout.is_op(s) for n in s.made}
    remade = {layout.storage_of.get(node, -1) for node in chain}
    steps: dict[Step, None] = {}
    sources: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> None:
        step = chain.get(node)
        if step is None and layout.storage_of.get(node, -2) in remade:
            step = views.get(node)
        if step is None:
            if node not in joint.constants:
                sources[node] = None
        elif step not in steps:
            for source in inputs_again(step):
                visit(source)
            steps[step] = None

    for node in targets:
        visit(node)
    return Replay(storage, tuple(steps), tuple(sources), tuple(targets))


def inputs_again(step: Step) -> list[fx.Node]:
    """What a step reads when it runs again."""
    left_out = running_statistics(step)
    return [node for node in step.inputs if node not in left_out]


def running_statistics(step: Step) -> list[fx.Node]:
    """Inputs that a step gets None for when it runs again: a batch norm that is training."""
    node = step.node
    if node.target not in _BATCH_NORMS or not node.args[_TRAINING]:
        return []
    return [it for it in (node.args[place] for place in _RUNNING) if isinstance(it, fx.Node)]


def function_again(step: Step) -> Callable[..., Any] | None:
    """What to call in place of a step that runs again; None for the step itself."""
    if step.node.target is _FUNCTIONAL_NORM and running_statistics(step):
        return _norm_again
    return None


def _norm_again(
    x: Any, weight: Any, bias: Any, _mean: None, _variance: None, training: bool, *rest: float
) -> tuple[Any, ...]:
    again = _aten._native_batch_norm_legit.no_stats(x, weight, bias, training, *rest)
    return (*again, None, None)
