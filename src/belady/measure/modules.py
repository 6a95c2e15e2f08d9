"""Which module is running: its path, kept by global hooks while an iteration is observed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)


class RootCall:
    """The call of a root that is watched, of which torch may run no hook when it ends.

    After an exception that is no `Exception` (KeyboardInterrupt) it runs none, so whoever hears of
    the program next asks whether the call is still on the stack.

    Parameters
    ----------
    module
        The root; this is made inside its call.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._thread = threading.get_ident()
        # None if torch.compile made other frames of it: then nobody can tell.
        self._frame = _frame_of(module)
        self._over = False

    def is_over(self) -> bool:
        """Whether the call has ended; False in a thread or a backward, which cannot know."""
        if self._frame is None:
            return self._over
        if threading.get_ident() != self._thread or torch._C._current_graph_task_id() != -1:
            return False
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        if frame is None:
            # A frame that has ended would keep its callers alive, and with them the user's tensors.
            self._frame, self._over = None, True
        return self._over


def _frame_of(module: torch.nn.Module) -> FrameType | None:
    """Frame of the innermost call of ``module``."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module:
            break
        frame = frame.f_back
    return frame


@contextmanager
def module_paths(root: torch.nn.Module, stack: list[str]) -> Iterator[None]:
    """Keep on ``stack`` the paths of the modules of ``root`` whose forward is running.

    A module that is not part of ``root`` is named by its class in angle brackets; ``root`` itself
    by its class. Modules inside of compiled code are not told apart.
    """
    paths = {id(module): name for name, module in root.named_modules()}
    paths[id(root)] = type(root).__name__

    def enter(module: torch.nn.Module, _args: Any) -> None:
        if not torch.compiler.is_compiling():
            stack.append(paths.get(id(module), f"<{type(module).__name__}>"))

    def leave(_module: torch.nn.Module, _args: Any, _result: Any) -> None:
        if stack and not torch.compiler.is_compiling():
            stack.pop()

    handles = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        stack.clear()
