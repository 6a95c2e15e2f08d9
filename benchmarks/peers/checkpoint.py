"""torch.utils.checkpoint for each block, without reentrant backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint

from benchmarks.peers.base import Applied, Peer, blocks_wrapped, needs_blocks
from benchmarks.workloads import Workload


def checkpointed(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The forward, run again in backward."""
    return partial(checkpoint, forward, use_reentrant=False, **options)


@contextmanager
def _applied(work: Workload) -> Iterator[Applied]:
    with blocks_wrapped(work, checkpointed):
        yield Applied(work.model)


PEERS = (Peer("checkpoint", "torch.utils.checkpoint, use_reentrant=False", needs_blocks, _applied),)
