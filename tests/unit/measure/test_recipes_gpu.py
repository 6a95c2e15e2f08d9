"""Convolutions are tried where replays run: torch keeps an algorithm of each for each thread."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from belady.measure import recipes
from belady.measure.recipes import draft, repeats
from belady.memory.thread import in_backward

pytestmark = pytest.mark.gpu
HERE = torch.device("cuda", 0)
CONVOLUTION = torch.ops.aten.convolution.default


def call(images: int) -> tuple[Any, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(images, 64, 56, 56, device="cuda", generator=generator)
    weight = torch.randn(64, 64, 3, 3, device="cuda", generator=generator)
    return x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1


def tried(args: tuple[Any, ...], result: torch.Tensor) -> bool:
    recipe = draft(CONVOLUTION, args, {}, lambda _: 0)
    assert recipe is not None
    return repeats(recipe, args, {}, result)


def test_they_run_on_the_thread_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    args, threads = call(3), []

    def run(_: Any, tensor_of: Any) -> tuple[torch.Tensor, ...]:
        threads.append(threading.get_ident())
        return (CONVOLUTION(*args),)

    monkeypatch.setattr(recipes.Recipe, "run", run)
    assert tried(args, CONVOLUTION(*args))
    assert threads == [in_backward(HERE, threading.get_ident)]
    assert threads != [threading.get_ident()]


def test_what_counts_is_what_comes_out_there() -> None:
    args = call(5)
    here = CONVOLUTION(*args)
    there = in_backward(HERE, lambda: CONVOLUTION(*args))
    assert tried(args, there)
    assert tried(args, here) == torch.equal(here, there)
    assert not tried(args, there.nextafter(torch.zeros_like(there)))


@pytest.mark.parametrize(
    ("cell", "gates"),
    [
        (torch.ops.aten._thnn_fused_lstm_cell.default, 4),
        (torch.ops.aten._thnn_fused_gru_cell.default, 3),
    ],
    ids=["lstm", "gru"],
)
def test_recurrent_cells_give_the_same_again(cell: Any, gates: int) -> None:
    made = [torch.randn(32, gates * 64, device="cuda") for _ in range(2)]
    args = (*made, torch.randn(32, 64, device="cuda"))
    recipe = draft(cell, args, {}, lambda _: 0)
    assert recipe is not None
    assert repeats(recipe, args, {}, cell(*args))
