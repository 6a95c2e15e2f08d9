"""DeepSpeed's activation checkpointing with checkpoints in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.peers.base import (
    Applied,
    Peer,
    blocks_wrapped,
    missing,
    needs_blocks,
    needs_cuda,
)
from benchmarks.workloads import Workload


def _available(work: Workload) -> str | None:
    return needs_cuda(work) or needs_blocks(work) or missing("deepspeed")


def _start() -> None:
    """DeepSpeed wants a process group, also of one."""
    from deepspeed import comm

    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from deepspeed.runtime.activation_checkpointing import checkpointing

    # Its checkpoints are reentrant: behind an input without gradient no parameter would get one.
    if not any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
        return forward(*args, **kwargs)
    return checkpointing.checkpoint(partial(forward, **kwargs), *args)


@contextmanager
def _applied(work: Workload) -> Iterator[Applied]:
    from deepspeed.runtime.activation_checkpointing import checkpointing

    _start()
    checkpointing.configure(
        None,
        partition_activations=False,
        contiguous_checkpointing=False,
        checkpoint_in_cpu=True,
        synchronize=False,
        profile=False,
    )
    with blocks_wrapped(work, lambda forward: partial(_checkpointed, forward)):
        yield Applied(work.model)


PEERS = (
    Peer("deepspeed", "deepspeed.checkpointing with checkpoint_in_cpu=True", _available, _applied),
)
