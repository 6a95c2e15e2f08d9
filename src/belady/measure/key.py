"""What must be the same for a plan to hold for a pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from belady.memory.geometry import shape_of

Key = tuple[Any, ...]


def pass_key(
    root: int, module: torch.nn.Module, call: tuple[Any, Any], device: torch.device
) -> Key:
    """Name the kind of pass that calling ``module`` with ``call = (args, kwargs)`` makes.

    Two passes of one kind issue the same ops on storages of the same sizes: same root, flags,
    input geometry, and parameters that require and have gradients.
    """
    inputs = tuple(_geometry(leaf) for leaf in tree_leaves(call))
    modules = walk([module])
    parameters = parameters_of(modules)
    learning = [p.requires_grad for p in parameters]
    without = [grad is None for grad in gradients_of(parameters)]
    # Not only the root's: frozen BatchNorm layers in a training model save other tensors.
    training = [m.training for m in modules]
    kind = device.type
    flags = (
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
        torch.get_default_dtype(),
    )
    return (root, hash((*training, *learning, *without)), flags, inputs)


def walk(roots: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """The modules ``roots`` and all below them, each as often as it occurs."""
    # `Module.modules` builds names and sets on the way, five times the cost of every call.
    found = list(roots)
    for module in found:
        if module._modules:
            # The loop goes on with these.
            found += [child for child in module._modules.values() if child is not None]
    return found


def parameters_of(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Parameters of the modules themselves, each as often as it occurs."""
    return [p for module in modules for p in module._parameters.values() if p is not None]


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """What backward has put on each parameter.

    None for what it puts nothing on: a module can have results of ops for parameters meanwhile
    (`torch.func.functional_call`), and whoever asks these for a gradient is warned by torch.
    """
    return [p.grad if p.is_leaf or p.retains_grad else None for p in parameters]


def gradients_in(modules: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """The gradients that there are of the modules and of all below them."""
    for module in modules:
        yield from (it for it in gradients_of(module.parameters()) if it is not None)


def _geometry(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        stride = leaf.stride() if leaf.layout is torch.strided and not leaf.is_nested else ()
        return (shape_of(leaf), stride, leaf.dtype, leaf.device, leaf.requires_grad)
    # Not numbers: a schedule's coefficient or a step count would make every pass a kind of its own.
    return leaf if isinstance(leaf, (bool, str, type(None))) else type(leaf)
