"""Convolutions of an observed iteration choose their algorithms as a plan will leave them room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from belady.memory.allowance import ran_out
from belady.memory.cap import keep_back

CONVOLUTIONS = frozenset(
    (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
)
KeepBack = Callable[[torch.device, object, int], None]
Issue = Callable[[Any, tuple[Any, ...], Any], Any]


def at_once(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Issue an op as it is."""
    return func(*args, **kwargs)


class Restrained:
    """Issues an op; a convolution with part of the budget kept back.

    The floor, which observed iterations run at, holds less than a plan does. cuDNN would take an
    algorithm with a workspace for which a plan has no room, and PyTorch keeps what was chosen.
    Whoever else takes memory of the device meanwhile has as much less.

    Parameters
    ----------
    nbytes
        What is kept back: what a plan leaves to the allocator.
    keep_back
        Lets torch reserve so many bytes less on a device for an owner; 0 undoes it.
    """

    def __init__(self, device: torch.device, nbytes: int, keep_back: KeepBack = keep_back) -> None:
        self._device, self._nbytes, self._keep_back = device, nbytes, keep_back

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Call ``func``; with all of the budget where memory runs out with less."""
        if func not in CONVOLUTIONS:
            return func(*args, **kwargs)
        try:
            return self._with_less(func, args, kwargs)
        except RuntimeError as error:
            if not ran_out(error):
                raise
        return func(*args, **kwargs)

    def _with_less(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        try:
            self._keep_back(self._device, self, self._nbytes)
            return func(*args, **kwargs)
        finally:
            self._keep_back(self._device, self, 0)
