"""Notices in-place writes to a saved tensor without keeping its bytes."""

from __future__ import annotations

import torch

from belady.errors import StaleValueError
from belady.memory.geometry import below_autograd, nothing_on, seen, unseen


def witness(tensor: torch.Tensor) -> torch.Tensor:
    """Make a tensor of no bytes that shares the version counter of ``tensor``.

    ``detach`` shares the counter; assigning ``data`` replaces the bytes and leaves the counter.
    """
    if seen():
        with unseen():
            return _witness(tensor)
    return _witness(tensor)


def _witness(tensor: torch.Tensor) -> torch.Tensor:
    with below_autograd():
        shadow = tensor.detach()
    shadow.data = nothing_on(tensor.device)
    return shadow


def demand_unchanged(shadow: torch.Tensor, version: int, shape: torch.Size | None = None) -> None:
    """Raise what plain autograd raises if a saved tensor was changed in place since.

    Without ``shape`` it is that of ``shadow`` itself, which is asked only when needed: a nested
    tensor has none.

    Raises
    ------
    StaleValueError
        A RuntimeError with autograd's words: hooks switch off autograd's own check.
    """
    if shadow._version != version:
        if shape is None and not shadow.is_nested:
            shape = shadow.shape
        what = "a saved tensor" if shape is None else f"a saved tensor of shape {list(shape)}"
        raise StaleValueError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {what} is at version {shadow._version}; expected version {version} "
            "instead. Hint: enable anomaly detection to find the operation that failed to compute "
            "its gradient, with torch.autograd.set_detect_anomaly(True)."
        )
