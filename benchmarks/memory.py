"""Device memory between iterations: what ran out of it, and letting go of what is left."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable

import torch

import belady
from belady.errors import InfeasibleBudgetError, ReplayError
from belady.memory.allowance import ran_out
from benchmarks.workloads import Workload


def starved(error: BaseException) -> bool:
    """Whether an error says that memory was too little."""
    return isinstance(error, belady.OutOfMemoryError) or ran_out(error)


def too_little(error: BaseException) -> bool:
    """Whether an error says that a budget was too small.

    A replay that came out otherwise does: a library that did not get the workspace of its algorithm
    took another one.
    """
    return starved(error) or isinstance(error, InfeasibleBudgetError | ReplayError)


def tidy(work: Workload | None, error: BaseException | None = None) -> None:
    """Let go of what an iteration left behind, also of what the frames of an error hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    if work is not None:
        work.optimizer.zero_grad()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def going_back(
    vm: belady.VirtualMemory, work: Workload, backward: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Run forward and backward, and where memory runs out once more, as its user is told to."""
    try:
        return backward()
    except torch.OutOfMemoryError as error:
        tidy(work, error)
    return vm.step(backward)


def retries_so_far() -> int:
    """How often torch's allocator had to flush its cache so far."""
    return int(torch.cuda.memory_stats()["num_alloc_retries"])
