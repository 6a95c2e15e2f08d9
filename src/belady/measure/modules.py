"""Which module is running: its path, kept by global hooks while an iteration is observed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)


@contextmanager
def module_paths(root: torch.nn.Module, stack: list[str]) -> Iterator[None]:
    """Keep on ``stack`` the paths of the modules of ``root`` whose forward is running.

    A module that is not part of ``root`` is named by its class in angle brackets; ``root`` itself
    by its class.
    """
    paths = {id(module): name for name, module in root.named_modules()}
    paths[id(root)] = type(root).__name__

    def enter(module: torch.nn.Module, _args: Any) -> None:
        stack.append(paths.get(id(module), f"<{type(module).__name__}>"))

    def leave(_module: torch.nn.Module, _args: Any, _result: Any) -> None:
        if stack:
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
