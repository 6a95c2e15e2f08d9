"""Whether modules of a root may run in slices now."""

from __future__ import annotations

import sys
import threading

import torch


class Gate:
    """Open while a pass of a root is under way, on its thread.

    What was judged is a call of the root. One of its modules that is called by itself, without
    hooks, in a transform or by another thread runs as it was made.
    """

    def __init__(self) -> None:
        self._at: tuple[int, int] | None = None

    @property
    def is_open(self) -> bool:
        """Whether a pass of any root is under way."""
        return self._at is not None

    def open(self, root: torch.nn.Module) -> None:
        """A pass of ``root`` begins."""
        self._at = (threading.get_ident(), id(root))

    def shut(self, root: torch.nn.Module) -> None:
        """A pass of ``root`` is over."""
        if self._at is not None and self._at[1] == id(root):
            self._at = None

    @property
    def is_here(self) -> bool:
        """Whether a pass of any root is under way on this thread."""
        return self._at is not None and self._at[0] == threading.get_ident()

    def lets(self, root: int) -> bool:
        """Whether modules of the root of that id may run in slices."""
        return in_backward() or self._at == (threading.get_ident(), root)


def in_backward() -> bool:
    """Whether a user's checkpoint may call again what ran in forward."""
    return torch._C._current_graph_task_id() != -1


def calls_under_way(module: torch.nn.Module) -> int:
    """How many calls of ``module`` are on this thread's stack."""
    frame, count = sys._getframe(), 0
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        count += frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module
    return count
