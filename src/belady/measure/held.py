"""What is held beside what a static trace shows: an optimizer's state, or what will be one."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

import torch

from belady.ir.trace import Storage, StorageKind, Tier, Trace
from belady.measure.key import gradients_in


def trained_bytes(trace: Trace) -> int:
    """Bytes of all gradients: what an optimizer keeps is so many times this, if anything."""
    return sum(it.nbytes for it in trace.storages if it.kind is StorageKind.GRADIENT)


def state_bytes(trace: Trace) -> int:
    """Bytes of what an optimizer keeps, as far as it is there."""
    return sum(it.nbytes for it in trace.storages if it.kind is StorageKind.STATE)


def missing_state(trace: Trace, copies: int) -> int:
    """Bytes that are not there yet of so many copies of all gradients."""
    return max(0, copies * trained_bytes(trace) - state_bytes(trace))


def with_state(trace: Trace, copies: int) -> Trace:
    """The trace with optimizer state of so many copies of all gradients, all the time."""
    sizes = [it.nbytes for it in trace.storages if it.kind is StorageKind.GRADIENT] * copies
    there = state_bytes(trace)
    left = (min(size, end - there) for size, end in zip(sizes, accumulate(sizes), strict=True))
    return _holding(trace, (it for it in left if it > 0))


def taken_bytes(modules: Iterable[torch.nn.Module], device: torch.device) -> int:
    """Bytes of torch's allocator in use now, but for gradients: traces have these as made anew.

    To be asked before an iteration: later it is what the engine itself holds. 0 on a CPU, where
    nobody counts.
    """
    if device.type != "cuda":
        return 0
    # A model before this one may be garbage in cycles, which nothing needs to be refused for.
    gc.collect()
    return torch.cuda.memory_allocated(device) - gradient_bytes(modules, device)


def gradient_bytes(modules: Iterable[torch.nn.Module], device: torch.device) -> int:
    """Bytes of the storages of the gradients that there are; of strided ones alone."""
    gradients = gradients_in(modules)
    strided = [it for it in gradients if type(it) is torch.Tensor and it.layout is torch.strided]
    storages = [it.untyped_storage() for it in strided if it.device == device]
    return sum({it._cdata: it.nbytes() for it in storages}.values())


def beside(trace: Trace, taken: int) -> Trace:
    """The trace with what it does not show of ``taken`` bytes, all the time.

    As a rule the state of an optimizer that has stepped before, or been loaded, and it is taken for
    it: where it is another model, `missing_state` is too little.

    Parameters
    ----------
    trace
        Static.
    taken
        From `taken_bytes`.
    """
    # Tensors that are plain attributes of a module are there too, whatever kind they pass for.
    there = {it.storage for it in trace.values if it.producer < 0}
    lasting = (at in there or it.kind is StorageKind.OTHER for at, it in enumerate(trace.storages))
    shown = sum(it.nbytes for it, lasts in zip(trace.storages, lasting, strict=True) if lasts)
    return _holding(trace, [taken - shown] if taken > shown else [])


def _holding(trace: Trace, sizes: Iterable[int]) -> Trace:
    end, device = len(trace.ops), next((it.device for it in trace.storages), trace.device)
    state = (Storage(device, it, StorageKind.STATE, 0, end, end, Tier.DEVICE) for it in sizes)
    return replace(trace, storages=(*trace.storages, *state))
