"""Lets layers go backward in the coordinated order until it is undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from belady.forwards import Forward, is_patched, run_plain
from belady.ordered.call import LAYERS, call, fits


def ordered(model: nn.Module) -> Callable[[], None]:
    """Let convolutions, linear layers and ReLUs of ``model`` go backward in the coordinated order.

    The gradients of the parameters come first, then the saved input is let go of, and only then
    is the gradient of the input computed: of the same size, it takes the input's place, where
    plain PyTorch holds both. A ReLU that has saved the input as its output lets go of it together
    with the layer, and keeps one byte an element, its sign. Nothing is gained where somebody else
    holds the input as well, such as a ReLU that is called as a function.

    Every `torch.nn.Conv1d`, ``Conv2d``, ``Conv3d``, `torch.nn.Linear` and `torch.nn.ReLU` takes
    part, but no subclass, and none with another forward than its class or below one. A call whose
    input or weight needs no gradient runs as before, and so does one under torch.compile,
    functorch's transforms or forward-mode differentiation. Results are the same in every bit: the
    same kernels run on the same numbers. Names, parameters, ``state_dict`` and hooks are as before.
    Copies and pickles of the model run plainly.

    Gradients of gradients are refused in backward (`OrderError`), but by ReLUs.

    Returns
    -------
    Callable
        Undoes it, once; graphs that exist by then still run backward in this order.

    Notes
    -----
    Source: Jin, Liu et al., ACM TACO 15(3), article 37 (2018): Layrub's intra-layer reuse; see
    `belady.planners.layrub`.
    """
    places = [_InOrder(module) for module in _reached(model, set()) if _takes_part(module)]
    for place in places:
        place.attach()

    def undo() -> None:
        while places:
            places.pop().detach()

    return undo


def _reached(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Each module once, but none below one with another forward than its class, such as slices.

    Who stands in the place of a forward may call what is below in a way of his own.
    """
    if module in seen or is_patched(module):
        return
    seen.add(module)
    yield module
    for child in module.children():
        yield from _reached(child, seen)


class _InOrder(Forward):
    """What a layer does in the place of its forward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        owner = self.alive()
        if len(args) != 1 or kwargs or not fits(owner, args[0]):
            return run_plain(owner, *args, **kwargs)
        return call(owner, *args)


def _takes_part(module: nn.Module) -> bool:
    return type(module) in LAYERS and vars(module).keys().isdisjoint({"forward", "_conv_forward"})
