"""Layrub's coordinated order, as a rewriting of captured backward graphs.

Layrub (Jin, Liu et al., ACM TACO 15(3), 2018) computes a layer's gradients of parameters before
that of its input, and lets the latter take the place of the saved input. Here a convolution's
backward becomes two calls, parameters first, of which the second gets a stand-in without bytes for
the input; the gradients of a linear layer change places; and of a ReLU's result the signs are taken
once the last op that reads it is done with it. Kernels, what they read and the order of sums stay
as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import fx

from belady.graph.doors import fake_value
from belady.graph.joint import Joint, Step
from belady.graph.layout import Layout
from belady.graph.ops import sequence_of
from belady.ordered.relu import goes_by_parts, is_dense
from belady.ordered.standin import Convolution

_aten = torch.ops.aten
_CONVOLUTION = _aten.convolution_backward.default
_RELU = _aten.threshold_backward.default
# Of its arguments: gradient, input, weight, sizes of the bias, then the settings, then which of its
# three results are asked for.
_INPUT, _WEIGHT, _SETTINGS, _MASK = 1, 2, slice(4, 10), 10


def coordinated(joint: Joint, layout: Layout) -> Joint:
    """The joint graph with backward in the coordinated order; the same nodes come in and go out."""
    steps = [made for step in joint.backward for made in _split(step)]
    steps = list(_parameters_first(steps, layout))
    return replace(joint, backward=tuple(_with_signs(joint, layout, steps)))


# -- convolutions ----------------------------------------------------------------------------------


def _split(step: Step) -> Iterator[Step]:
    """A convolution's backward as two, where it has gradients of both kinds; all else as it is."""
    if not _splits(step):
        yield step
        return
    to_input, *to_parameters = step.outputs
    args: Any = step.node.args
    mask = [None, *to_parameters]
    yield _several(step, [*args[:_MASK], [it is not None for it in mask]], mask)
    given, weight = fake_value(args[_INPUT]), args[_WEIGHT]
    stride, padding, dilation, _, _, groups = args[_SETTINGS]
    conv = Convolution(stride, padding, dilation, groups)
    geometry = (tuple(given.shape), tuple(given.stride()), *conv)
    bare = _new(step.node, torch.ops.belady.stand_in.default, (weight, *geometry))
    with given.fake_mode:
        bare.meta["val"] = torch.ops.belady.stand_in(fake_value(weight), *geometry)
    yield Step(bare, (bare,), several=False)
    rest = [args[0], bare, weight, None, *args[_SETTINGS], [True, False, False]]
    yield _several(step, rest, [to_input, None, None])


def _splits(step: Step) -> bool:
    if step.node.target is not _CONVOLUTION:
        return False
    to_input, *to_parameters = step.outputs
    args: Any = step.node.args
    transposed = args[_SETTINGS][3]
    # In one dimension torch works on views of two, of which a stand-in knows nothing.
    flat = len(fake_value(args[_INPUT]).shape) < 4
    return to_input is not None and any(to_parameters) and not (transposed or flat)


def _several(step: Step, args: Sequence[Any], outputs: Sequence[fx.Node | None]) -> Step:
    """Another call of the op of ``step`` for some of its results."""
    node = _new(step.node, step.node.target, args)
    node.meta["val"] = tuple(None if it is None else fake_value(it) for it in outputs)
    return Step(node, tuple(outputs), several=True)


# -- linear layers ---------------------------------------------------------------------------------


def _parameters_first(steps: Sequence[Step], layout: Layout) -> Iterator[Step]:
    """Of what one node of autograd computes, first what no other node goes on with."""
    readers: dict[fx.Node, list[Step]] = {}
    for step in steps:
        for node in step.inputs:
            readers.setdefault(node, []).append(step)
    onward: dict[Step, bool] = {}
    for step in reversed(steps):
        after = (it for node in step.made for it in readers.get(node, ()))
        onward[step] = any(
            onward[it] or (sequence_of(it) != sequence_of(step) and _works(it, layout))
            for it in after
        )
    for number, run in groupby(steps, sequence_of):
        group = tuple(run)
        yield from group if number < 0 else _sorted(group, onward)


def _works(step: Step, layout: Layout) -> bool:
    known = all(node in layout.storage_of for node in step.made)
    return not known or layout.is_op(step)


def _sorted(run: Sequence[Step], onward: Mapping[Step, bool]) -> Iterator[Step]:
    made_by = {node: step for step in run for node in step.made}
    done: dict[Step, None] = {}

    def issue(step: Step) -> None:
        for node in step.inputs:
            if node in made_by:
                issue(made_by[node])
        done[step] = None

    for step in (*(it for it in run if not onward[it]), *run):
        issue(step)
    return iter(done)


# -- ReLUs -----------------------------------------------------------------------------------------


def _with_signs(joint: Joint, layout: Layout, steps: Sequence[Step]) -> Iterator[Step]:
    """Let go of what a ReLU has saved where the last layer has read it."""
    after: dict[Step, list[Step]] = {}
    instead: dict[Step, tuple[Step, ...]] = {}
    ours = _saved_alone(joint, layout)
    reading = _readers(layout, steps)
    for step in steps:
        args: Any = step.node.args
        if step.node.target is _RELU and args[2] == 0:
            output = args[1]
            storage = layout.storage_of.get(output, -1)
            *before, last = reading.get(storage, [step])
            if storage in ours and last is step and is_dense(fake_value(output)):
                signs = _signs_of(step, output)
                passed = _passed(step, signs.node)
                instead[step] = (passed,) if before else (signs, passed)
                if before:
                    after.setdefault(before[-1], []).append(signs)
    for step in steps:
        yield from instead.get(step, (step,))
        yield from after.get(step, ())


def _saved_alone(joint: Joint, layout: Layout) -> set[int]:
    """Storages that a ReLU makes in forward and backward alone goes on to hold.

    A threshold of 0 has the same backward, but saves its input, which can be negative.
    """
    relus = (step for step in joint.forward if step.node.target is _aten.relu.default)
    made = {layout.storage_of.get(node, -1) for step in relus for node in step.made}
    outside = (*joint.primals, *joint.forward_outputs)
    return made - {layout.storage_of.get(it, -1) for it in outside if isinstance(it, fx.Node)}


def _readers(layout: Layout, steps: Iterable[Step]) -> dict[int, list[Step]]:
    """The ops that read each storage, in order."""
    found: dict[int, list[Step]] = {}
    for step in steps:
        if _works(step, layout):
            for storage in layout.reads(step):
                found.setdefault(storage, []).append(step)
    return found


def _signs_of(step: Step, output: fx.Node) -> Step:
    # Never below zero; NaN lets a gradient pass, as in plain PyTorch.
    node = _new(step.node, _aten.ne.Scalar, (output, 0))
    given = fake_value(output)
    with given.fake_mode:
        node.meta["val"] = given != 0
    return Step(node, (node,), several=False)


def _passed(step: Step, signs: fx.Node) -> Step:
    """The gradient of a ReLU by the signs of its result."""
    gradient: Any = step.node.args[0]
    if goes_by_parts(fake_value(gradient), fake_value(signs)):
        node = _new(step.node, torch.ops.belady.passed_by_sign.default, (gradient, signs))
    else:
        node = _new(step.node, _RELU, (gradient, signs, 0))
    node.meta["val"] = fake_value(step.node)
    return Step(node, step.outputs, several=False)


def _new(like: fx.Node, target: Any, args: Sequence[Any]) -> fx.Node:
    """A node that stands for another way to what ``like`` does."""
    node = like.graph.call_function(target, tuple(args))
    node.meta = {name: it for name, it in like.meta.items() if name != "val"}
    return node
