"""What is held beside what a static trace shows: an optimizer's state, or what will be one."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

import torch

from belady.ir.trace import Storage, StorageKind, Tier, Trace


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
    gradients = [it for it in trace.storages if it.kind is StorageKind.GRADIENT] * copies
    upto = accumulate(it.nbytes for it in gradients)
    there = state_bytes(trace)
    missing = [it.nbytes for it, end in zip(gradients, upto, strict=True) if end > there]
    return _holding(trace, missing)


def taken_bytes(modules: Iterable[torch.nn.Module], device: torch.device) -> int:
    """Bytes of torch's allocator in use now, but for gradients: traces have these as made anew.

    To be asked before an iteration: later it is what the engine itself holds. 0 on a CPU, where
    nobody counts.
    """
    if device.type != "cuda":
        return 0
    # A model before this one may be garbage in cycles, which nothing needs to be refused for.
    gc.collect()
    parameters = (it for module in modules for it in module.parameters())
    gradients = [it.grad for it in parameters if type(it.grad) is torch.Tensor]
    held = {it.untyped_storage()._cdata: it.nbytes for it in gradients if it.device == device}
    return torch.cuda.memory_allocated(device) - sum(held.values())


def beside(trace: Trace, taken: int) -> Trace:
    """The trace with what it does not show of ``taken`` bytes, all the time.

    As a rule the state of an optimizer that has stepped before, or been loaded.

    Parameters
    ----------
    trace
        Static.
    taken
        From `taken_bytes`.
    """
    known = (StorageKind.PARAMETER, StorageKind.BUFFER, StorageKind.INPUT, StorageKind.OTHER)
    shown = sum(it.nbytes for it in trace.storages if it.kind in known and it.birth == 0)
    return _holding(trace, [taken - shown] if taken > shown else [])


def _holding(trace: Trace, sizes: Iterable[int]) -> Trace:
    end, device = len(trace.ops), next((it.device for it in trace.storages), trace.device)
    state = (Storage(device, it, StorageKind.STATE, 0, end, end, Tier.DEVICE) for it in sizes)
    return replace(trace, storages=(*trace.storages, *state))
