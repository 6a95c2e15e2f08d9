"""Choices of cuDNN's algorithms beside those that the process had.

PyTorch keeps what it chose for a convolution under a key, and nothing takes a choice back. But
``torch.backends.cudnn.deterministic`` is in the key: what is chosen while it is on holds only while
it is on, and once it is off again everything is as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Beside:
    """Users of the other choices: the first turns to them, the last turns back."""

    def __init__(self) -> None:
        self.users = 0
        self._before = False

    def enter(self) -> None:
        if not self.users:
            self._before = torch._C._get_cudnn_deterministic()
            torch._C._set_cudnn_deterministic(True)
        self.users += 1

    def leave(self) -> None:
        self.users -= 1
        if not self.users:
            torch._C._set_cudnn_deterministic(self._before)


_BESIDE = _Beside()


@contextmanager
def beside() -> Iterator[None]:
    """Let convolutions of all threads use the other choices, and make them, for a while."""
    _BESIDE.enter()
    try:
        yield
    finally:
        _BESIDE.leave()


def available(device: torch.device) -> bool:
    """Whether there are choices of cuDNN to be made that can be taken back.

    Where the user asked for deterministic algorithms, in either way, the choices beside would be
    the user's own.
    """
    if device.type != "cuda" or torch.version.cuda is None or not torch.backends.cudnn.enabled:
        return False
    asked = torch._C._get_cudnn_deterministic() and not _BESIDE.users
    return not (asked or torch.are_deterministic_algorithms_enabled())
