"""Selective checkpointing of each block: matmuls and convolutions are saved, the rest replayed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from benchmarks.peers.base import Applied, Peer, blocks_wrapped, needs_blocks
from benchmarks.peers.checkpoint import checkpointed
from benchmarks.workloads import Workload

_aten = torch.ops.aten
# What costs most to compute again.
SAVED = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


def _policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _applied(work: Workload) -> Iterator[Applied]:
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    with blocks_wrapped(work, partial(checkpointed, context_fn=contexts)):
        yield Applied(work.model)


PEERS = (
    Peer(
        "selective",
        "torch.utils.checkpoint.create_selective_checkpoint_contexts: saves matmuls, convolutions "
        "and attention",
        needs_blocks,
        _applied,
    ),
)
