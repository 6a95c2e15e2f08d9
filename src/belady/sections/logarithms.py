"""Of which logarithms PyTorch's cross-entropy is made, and what autocast casts of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from belady.sections.standing import Function


class _Logarithms(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes of which dtype logarithms are taken."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype: torch.dtype | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._log_softmax.default:
            self.dtype = args[0].dtype
        return func(*args, **kwargs or {})


def is_torchs(function: Function) -> bool:
    """Whether it is PyTorch's: another's may do something else, and need not outlive its owner."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == F.__file__


@cache
def casts_logarithms(
    function: Function, device: torch.device, dtype: torch.dtype, autocast: torch.dtype
) -> bool:
    """Whether ``function`` takes logarithms of half precision, and autocast casts all of them.

    On a CPU autocast casts the logits instead.
    """
    with _disable_current_modes(), torch.no_grad(), torch.autocast(device.type, autocast):
        logits = torch.zeros(1, 1, dtype=dtype, device=device)
        target = torch.zeros(1, dtype=torch.int64, device=device)
        with _Logarithms() as seen:
            loss = function(logits, target, reduction="none")
    return seen.dtype is dtype and loss.dtype is torch.float32
