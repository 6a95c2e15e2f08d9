"""Parameters and buffers that have no bytes before their module is called (`nn.LazyLinear`)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from belady.measure.key import parameters_of, walk

_KINDS = LazyModuleMixin, UninitializedParameter, UninitializedBuffer


def why_uninitialized(module: torch.nn.Module) -> str:
    """Why a call of ``module`` is not to be watched yet, as a sentence; empty if it may be.

    What the call initializes would come to be under hooks of ours, on tensors without bytes (where
    a module changes its class, for good), or before what draws random numbers ahead of it.
    """
    parts = walk([module])
    buffers = [it for part in parts for it in part._buffers.values()]
    kinds = {*map(type, parts), *map(type, parameters_of(parts)), *map(type, buffers)}
    # Most models have none, and few classes to ask.
    if not any(issubclass(kind, _KINDS) for kind in kinds):
        return ""
    tensors = (*module.named_parameters(), *module.named_buffers())
    lacking = [
        *(path for path, it in tensors if is_lazy(it)),
        *(path for path, it in module.named_modules() if _is_to_infer(it)),
    ]
    name = type(module).__name__
    of = f" {lacking[0]}" if lacking and lacking[0] else ""
    return f"calls of {name} run as plain PyTorch until{of} is initialized" if lacking else ""


def initialized(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those that have bytes."""
    return [it for it in tensors if not is_lazy(it)]


def lasting_in(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Parameters and buffers of the modules themselves, as far as they have bytes."""
    parts = list(modules)
    buffers = (it for part in parts for it in part._buffers.values() if it is not None)
    return initialized((*parameters_of(parts), *buffers))


def _is_to_infer(module: torch.nn.Module) -> bool:
    """Whether a lazy module has not been called; one may lack sizes alone."""
    return isinstance(module, LazyModuleMixin) and hasattr(module, "_initialize_hook")
