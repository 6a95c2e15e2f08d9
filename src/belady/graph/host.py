"""Who decides how captured graphs run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from belady.graph.captured import Captured
from belady.graph.state import State, Turn


class Host(Protocol):
    """Decides how graphs run.

    Attributes
    ----------
    budget_bytes
        What they may hold on the device.
    plain_bits
        Whether they are to have the bits of plain PyTorch.
    """

    device: torch.device
    budget_bytes: int
    plain_bits: bool

    def captured(self, graph: Captured) -> None:
        """A new graph was captured."""
        ...

    def not_captured(self, reason: str) -> None:
        """A graph runs as plain PyTorch, since this engine cannot carry it out."""
        ...

    def enter(self, graph: Captured, args: Sequence[Any]) -> Turn:
        """A forward is about to run."""
        ...

    def left(self, graph: Captured, state: State, results: Sequence[Any]) -> None:
        """It has run."""
        ...

    def differs(self, graph: Captured, word: str) -> None:
        """A backward is about to run of which a word of `belady.graph.bits` holds."""
        ...

    def enter_backward(self, state: State, args: Sequence[Any]) -> None:
        """A backward is about to run."""
        ...

    def left_backward(self, state: State, results: Sequence[Any]) -> None:
        """It has run."""
        ...

    def starved(self) -> None:
        """It ran out of the device's memory."""
        ...
