"""What torch calls back: hooks that keep nothing alive and stay with the model that they are on."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch


class Callback:
    """A hook that keeps nothing alive, and that a copied or saved model leaves behind."""

    def __init__(self, owner: object, method: str) -> None:
        self._owner = weakref.ref(owner)
        self._method = method

    def __call__(self, *args: Any) -> None:
        """Call the method, if there still is whose it is."""
        owner = self._owner()
        if owner is not None:
            getattr(owner, self._method)(*args)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _left_out, ()


class Untraced(Callback):
    """One that is not compiled with a step that is: it would enter a mode while that is traced."""

    # Not `torch.compiler.disable`, which loads the compiler at once.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def __call__(self, *args: Any) -> None:
        """Call the method, and none of it is traced."""
        super().__call__(*args)


def _left_out() -> Callable[..., None]:
    return _nothing


def _nothing(*_args: Any) -> None:
    """Stand for a hook of belady in a copy of a model."""
