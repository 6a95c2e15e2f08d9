"""Movements at the seams of fused kernels, on parts of a graph that are names alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from belady.graph.orders import Act, Acts, Orders
from belady.graph.replays import from_statistics
from belady.graph.seams import at_seams, read_in_run

LAYOUT: Any = SimpleNamespace(is_op=lambda step: "view" not in step.node.target)
# Seams: before op 0, around the convolution (op 2) and at the end.
NAMES = ("tanh", "view", "relu", "convolution", "native_batch_norm", "relu", "exp")


def step(name: str, *inputs: str) -> Any:
    node = SimpleNamespace(target=f"aten.{name}.default")
    return SimpleNamespace(node=node, inputs=list(inputs))


STEPS = [step(name) for name in NAMES]
JOINT: Any = SimpleNamespace(forward=STEPS, backward=STEPS)


def moved(acts: Acts) -> Acts:
    orders = at_seams(Orders(forward=acts, backward=acts), JOINT, LAYOUT)
    assert orders.forward == orders.backward
    return dict(orders.forward)


@pytest.mark.parametrize(
    ("act", "at", "seam"),
    [
        (Act.SEND, 1, 2),
        (Act.FREE, 4, 6),
        (Act.BRING, 1, 0),
        (Act.BRING, 5, 3),
        (Act.SEND, 2, 2),
        (Act.BRING, 3, 3),
        (Act.FREE, 6, 6),
        (Act.ENCODE, 4, 4),
    ],
)
def test_what_goes_is_later_and_what_comes_earlier(act: Act, at: int, seam: int) -> None:
    assert moved({at: [(act, 7)]}) == {seam: [(act, 7)]}


def test_what_goes_makes_room_for_what_comes_back_there() -> None:
    acts = {2: [(Act.BRING, 1)], 1: [(Act.SEND, 2), (Act.FREE, 2)]}
    assert moved(acts) == {2: [(Act.SEND, 2), (Act.FREE, 2), (Act.BRING, 1)]}


def test_a_value_never_comes_back_before_it_went() -> None:
    acts = {4: [(Act.FREE, 1)], 5: [(Act.BRING, 1)]}
    assert moved(acts) == acts


def test_a_run_begins_with_what_came_back_for_any_of_its_ops() -> None:
    names = (("relu", "a"), ("exp", "kept"), ("tanh", "b"), ("relu", "c"), ("mm", "d"))
    steps = [step(name, read) for name, read in names]
    nodes = cast(Any, ["a", "b", "c", "d"])
    # Between the second and the third op something is due, so a run ends there.
    acts = {2: [(Act.FREE, 9)]}
    assert read_in_run(steps, LAYOUT, acts, nodes) == [["a"], [], ["b", "c"], [], ["d"]]


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 5), (6, 4, 3, 3)])
@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_from_its_statistics_is_the_norm(shape: tuple[int, ...], affine: bool) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3 + 1
    weight, bias = (torch.rand(4) + 1, torch.rand(4)) if affine else (None, None)
    norm = torch.ops.aten._native_batch_norm_legit.no_stats
    expected, mean, inverse = norm(x, weight, bias, True, 0.0, 1e-5)
    found = from_statistics(x, weight, bias, mean, inverse, 1e-5)
    torch.testing.assert_close(found, expected)
    assert from_statistics(x.bfloat16(), weight, bias, mean, inverse, 1e-5).dtype is torch.bfloat16
