"""Calls on the thread in which autograd runs backward.

Libraries keep state for each thread that calls them: cuBLAS its workspaces, and torch the algorithm
that cuDNN took for a convolution (``thread_local`` in ``aten/src/ATen/native/cudnn/Conv_v8.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

T = TypeVar("T")


def in_backward(device: torch.device, call: Callable[[], T]) -> T:
    """Call where autograd runs backward of ``device``, on the current stream; wait for the result.

    Exceptions come out as they are. No dispatch mode of the caller sees the call.
    """
    made: list[T] = []
    raised: list[BaseException] = []

    def note() -> None:
        try:
            made.append(call())
        except BaseException as error:
            # Autograd's thread would hold on to it, and to all that its frames hold, for a while.
            raised.append(error)

    with (
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        one = torch.ones((), device=device, requires_grad=True)
        result = _Call.apply(one, note)  # type: ignore[no-untyped-call]
        result.backward()
    if raised:
        raise raised.pop()
    return made[0]


class _Call(torch.autograd.Function):
    """Its backward calls, and gives no gradient."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return one.clone()

    @staticmethod
    def backward(ctx: Any, _grad: torch.Tensor) -> tuple[None, None]:
        ctx.call()
        return None, None
