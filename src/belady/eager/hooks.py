"""Putting a pair of saved-tensor hooks on autograd's stack, and taking exactly that pair off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from belady.measure.calls import compiled_anything

_autograd = torch._C._autograd
Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


def aside_from_compile(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``hook`` as code that torch.compile leaves alone, where it is used at all.

    Within a compiled callable it would compile the frames of hooks too.
    """
    if not compiled_anything():
        return hook

    # A function, not a method: Dynamo marks it by attributes.
    def alone(given: Any) -> Any:
        return hook(given)

    left: Callable[[Any], Any] = torch.compiler.disable(alone)  # type: ignore[no-untyped-call]
    return left


def tell(error: BaseException) -> None:
    """Add to torch's error what to do, where something in a forward takes no such hooks; once."""
    if "saved tensor hooks" in str(error) and not getattr(error, "__notes__", ()):
        error.add_note(
            "belady: engine='eager' manages what autograd saves by these hooks, which torch.func's "
            "gradients do not take; engine='graph' has none, and captures such a forward if "
            "torch.compile can"
        )


class HookPair:
    """A pair that can be put on the stack of this thread and taken off again, whatever the order.

    Parameters
    ----------
    pack, unpack
        As for `torch.autograd.graph.saved_tensors_hooks`.
    """

    def __init__(self, pack: Pack, unpack: Unpack) -> None:
        # The stack gives back the objects that it was given: ``pack`` is the token.
        self._pair = (pack, unpack)

    def push(self) -> None:
        """Put the pair on top."""
        _autograd._push_saved_tensors_default_hooks(*self._pair)

    def lift(self) -> bool:
        """Take the pair off if it is on top; else False."""
        top = outer_pair()
        if top is None or top[0] is not self._pair[0]:
            return False
        _autograd._pop_saved_tensors_default_hooks()
        return True

    def pop(self) -> bool:
        """Take the pair off; False when it is not on this thread's stack.

        Pairs of others that lie above it (left there by an exception) are put back.
        """
        above: list[tuple[Pack, Unpack]] = []
        found = False
        while (top := outer_pair()) is not None:
            _autograd._pop_saved_tensors_default_hooks()
            if top[0] is self._pair[0]:
                found = True
                break
            above.append(top)
        for pair in reversed(above):
            _autograd._push_saved_tensors_default_hooks(*pair)
        return found


def outer_pair() -> tuple[Pack, Unpack] | None:
    """The pair on top of this thread's stack, or None."""
    pair: tuple[Pack, Unpack] | None = _autograd._top_saved_tensors_default_hooks(True)
    return pair
