"""Whose a module is: one `VirtualMemory` manages it at a time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_OWNERS: weakref.WeakKeyDictionary[nn.Module, weakref.finalize[..., Any]]
_OWNERS = weakref.WeakKeyDictionary()


@contextmanager
def taken(module: nn.Module, owner: weakref.finalize[..., Any]) -> Iterator[None]:
    """Take the module in the block for the owner that ``owner`` closes, unless the body raises.

    Raises
    ------
    ValueError
        If it belongs to another that is open, or this one is closed.
    """
    if not owner.alive:
        raise ValueError(
            "this VirtualMemory is closed: make another one, by belady.virtualize, for the "
            f"{type(module).__name__}"
        )
    if _is_anothers(module, owner):
        # One that was dropped is closed when it is collected; nobody could close it any more.
        gc.collect()
    if _is_anothers(module, owner):
        raise ValueError(
            f"another VirtualMemory manages this {type(module).__name__} already: close that one "
            "first (vm.close(), or belady.virtualize in a with statement)"
        )
    yield
    _OWNERS[module] = owner


def _is_anothers(module: nn.Module, owner: weakref.finalize[..., Any]) -> bool:
    known = _OWNERS.get(module)
    return known is not None and known is not owner and known.alive
