"""What runs again, and from what, when a storage of forward is made again in backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from belady.graph.doors import fake_value
from belady.graph.joint import Joint, Step
from belady.graph.layout import Layout

_aten = torch.ops.aten
_NORM = _aten._native_batch_norm_legit.no_stats
_FUNCTIONAL_NORM = _aten._native_batch_norm_legit_functional.default
# The norms over a batch that also update running statistics. They do not need these while they
# train, and must not update them again.
_UPDATING = frozenset(
    {_FUNCTIONAL_NORM, _aten.native_batch_norm.default, _aten.cudnn_batch_norm.default}
)
# Takes an input, weight, bias, the mean and the inverse deviation, and epsilon; not on a CPU.
FROM_STATISTICS = _aten.batch_norm_elemt.default
_DROPOUT = _aten.native_dropout.default
# Takes an input, what was drawn, and a factor.
FROM_MASK = _aten.native_dropout_backward.default
# Positions of arguments.
_RUNNING, _TRAINING = 3, 5


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
    overwrites
        Whether a step writes over what another one has made.
    """

    storage: int
    steps: tuple[Step, ...]
    sources: tuple[fx.Node, ...]
    targets: tuple[fx.Node, ...]
    overwrites: bool


def replays_of(
    joint: Joint, layout: Layout, orders: Mapping[int, Iterable[Step]]
) -> dict[int, Replay]:
    """The replay of each storage in ``orders``, which runs as many of its steps as it needs.

    One that starts from a storage that is made again itself makes that one do so in time.
    """
    wanted = {storage: dict[fx.Node, None]() for storage in orders}
    for node in joint.crossing:
        storage = layout.storage_of.get(node, -1)
        if storage in wanted:
            wanted[storage][node] = None
    found: dict[int, Replay] = {}
    forward = _Forward(joint, layout)
    pending = [*orders]
    while pending:
        storage = pending.pop()
        replay = forward.replay_of(storage, orders[storage], wanted[storage])
        found[storage] = replay
        for node in replay.sources:
            behind = layout.storage_of.get(node, -1)
            if node not in wanted.get(behind, {node: None}):
                wanted[behind][node] = None
                pending.append(behind)
    return found


class _Forward:
    """What replays of one graph ask of its forward, looked up once for all of them."""

    def __init__(self, joint: Joint, layout: Layout) -> None:
        self._joint, self._layout = joint, layout
        self._views = {n: s for s in joint.forward if not layout.is_op(s) for n in s.made}
        self._issued = {n: place for place, step in enumerate(joint.forward) for n in step.made}

    def replay_of(self, storage: int, ops: Iterable[Step], targets: Iterable[fx.Node]) -> Replay:
        """The replay that makes ``targets`` on a storage again, by some of ``ops`` and views."""
        chain = {node: step for step in ops for node in step.made}
        remade = {self._layout.storage_of.get(node, -1) for node in chain}
        steps: dict[Step, None] = {}
        sources: dict[fx.Node, None] = {}

        # By hand: between two ops there may be any number of views.
        pending = [*targets][::-1]
        while pending:
            node = pending.pop()
            step = chain.get(node)
            if step is None and self._layout.storage_of.get(node, -2) in remade:
                step = self._views.get(node)
            if step is None:
                if node not in self._joint.constants:
                    sources[node] = None
            elif step not in steps:
                steps[step] = None
                pending += reversed(step.inputs)
        # What is let go meanwhile follows from the order, and that of the trace is what is counted.
        order = sorted(steps, key=lambda step: min(self._issued[node] for node in step.made))
        overwrites = any(self._layout.writes_to(step) for step in order)
        return Replay(storage, tuple(order), tuple(sources), tuple(targets), overwrites)


def again(step: Step) -> Step:
    """The step as it runs again: a batch norm without its running statistics."""
    target, args = step.node.target, step.node.args
    if target is _NORM or not is_training_norm(step):
        return step
    operands, numbers = args[:_RUNNING], args[_TRAINING:]
    if target is _FUNCTIONAL_NORM:
        return _instead(step, norm_again, (*operands, *numbers), step.outputs, several=True)
    return _instead(step, target, (*operands, None, None, *numbers), step.outputs, several=True)


def norm_again(x: Any, weight: Any, bias: Any, training: bool, *rest: float) -> tuple[Any, ...]:
    """A batch norm that trains, and no next running statistics: its backward reads none."""
    return (*_NORM(x, weight, bias, training, *rest), None, None)


def from_statistics(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    _epsilon: float,
) -> torch.Tensor:
    """What `FROM_STATISTICS` computes, in ops that a compiler can fuse with others."""
    shape = (1, -1, *(1,) * (x.dim() - 2))
    made = (x.to(mean.dtype) - mean.view(shape)) * inverse.view(shape)
    if weight is not None:
        made = made * weight.view(shape)
    if bias is not None:
        made = made + bias.view(shape)
    return made.to(x.dtype)


def from_mask(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """What `FROM_MASK` computes: its kernels multiply at least float32, and round once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * mask.to(wide) * scale).to(x.dtype)


def shortcut_of(joint: Joint, step: Step) -> Step | None:
    """Another step to the first result of one; whether to the same bits is to be tried.

    A norm over the batch saves its statistics: with them the second of its two kernels is enough.
    A dropout saves what it has drawn: with that its input is scaled again, and nothing is drawn.
    None for any other op, and where backward does not have what was saved.
    """
    if step.node.target is _DROPOUT:
        return _as_drawn(joint, step)
    if not is_training_norm(step):
        return None
    args = step.node.args
    result, *statistics = step.outputs[:3]
    if result is None or not set(statistics).issubset(joint.crossing):
        return None
    short = (*args[:_RUNNING], *statistics, args[-1])
    return _instead(step, FROM_STATISTICS, short, (result,), several=False)


def _as_drawn(joint: Joint, step: Step) -> Step | None:
    """A dropout by its mask, as its gradient is made from that of its result."""
    (x, share), (result, mask) = step.node.args[:2], step.outputs
    if result is None or mask not in joint.crossing:
        return None
    if not isinstance(share, float) or not 0 < share < 1:
        return None
    scale, made = 1 / (1 - share), fake_value(result)
    if made.device.type == "cuda" and made.dtype is not torch.float64:
        # Its kernels divide float32.
        scale = (1 / torch.tensor(1 - share, dtype=torch.float32)).item()
    return _instead(step, FROM_MASK, (x, mask, scale), (result,), several=False)


def is_training_norm(step: Step) -> bool:
    """Whether it is a batch norm by the statistics of its batch."""
    target, args = step.node.target, step.node.args
    if target is _NORM:
        return bool(args[_RUNNING])
    return target in _UPDATING and bool(args[_TRAINING])


def _instead(
    step: Step, target: Any, args: tuple[Any, ...], outputs: tuple[Any, ...], *, several: bool
) -> Step:
    """A step that stands in no graph."""
    node = fx.Node(step.node.graph, step.node.name, "call_function", target, args, {})
    for source in node.all_input_nodes:
        del source.users[node]
    return Step(node, outputs, several)
