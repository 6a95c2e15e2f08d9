"""A gradient of a gradient that captured graphs refuse."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

from belady.graph.autograd import when_asked_for_more


class Refusing:
    def __call__(self) -> None:
        """Nobody asks."""


class CutShort(torch.autograd.Function):
    """Its backward fails after it has got ready for being differentiated itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, refuse: Refusing) -> torch.Tensor:
        ctx.refuse = refuse
        return x * 1

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        when_asked_for_more(ctx.refuse)
        raise RuntimeError("cut short")


def failing(refuse: Refusing) -> None:
    result: torch.Tensor = CutShort.apply(torch.ones(2, requires_grad=True), refuse)  # type: ignore[no-untyped-call]
    try:
        result.sum().backward()
    except RuntimeError:
        return
    raise AssertionError("it is cut short")


def test_a_backward_that_is_cut_short_leaves_nothing() -> None:
    refuse = Refusing()
    gone = weakref.ref(refuse)
    gc.disable()
    try:
        failing(refuse)
        del refuse
        assert gone() is None
    finally:
        gc.enable()
