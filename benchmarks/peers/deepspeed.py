"""DeepSpeed's activation checkpointing with checkpoints in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

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


@contextmanager
def _applied(work: Workload) -> Iterator[Applied]:
    from deepspeed.runtime.activation_checkpointing import checkpointing

    checkpointing.configure(
        None,
        partition_activations=False,
        contiguous_checkpointing=False,
        checkpoint_in_cpu=True,
        synchronize=False,
        profile=False,
    )
    with blocks_wrapped(work, lambda forward: partial(checkpointing.checkpoint, forward)):
        yield Applied(work.model)


PEERS = (
    Peer("deepspeed", "deepspeed.checkpointing with checkpoint_in_cpu=True", _available, _applied),
)
