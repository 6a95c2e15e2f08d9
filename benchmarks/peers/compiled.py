"""torch.compile: Inductor as it comes, with torch's own budget for what is saved, and checkpointed.

``activation_memory_budget`` is a share of the bytes that the partitioner would save, not of the
peak. Fusion changes bits, so that results need not equal plain's.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch._functorch.config

from benchmarks.peers.base import Applied, Peer, blocks_wrapped, missing, needs_blocks
from benchmarks.peers.checkpoint import checkpointed
from benchmarks.workloads import Workload

BUDGETS = (0.7, 0.5, 0.25, 0.0)


def _available(work: Workload) -> str | None:
    if work.setting.device == "cuda":
        return missing("triton")
    return None if shutil.which("g++") else "Inductor needs a C++ compiler on a CPU"


@contextmanager
def _applied(work: Workload, budget: float) -> Iterator[Applied]:
    # Compiled code holds on to the model; what an earlier budget compiled is of no use either.
    torch._dynamo.reset()
    try:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            yield Applied(torch.compile(work.model))
    finally:
        torch._dynamo.reset()


def _blocks_available(work: Workload) -> str | None:
    return needs_blocks(work) or _available(work)


@contextmanager
def _checkpointed(work: Workload) -> Iterator[Applied]:
    # Inside of what is compiled: its partitioner makes again what a block makes, fused.
    with blocks_wrapped(work, checkpointed), _applied(work, 1.0) as applied:
        yield applied


PEERS = (
    Peer("inductor", "torch.compile, defaults", _available, partial(_applied, budget=1.0)),
    *(
        Peer(
            f"inductor-{budget:g}",
            f"torch.compile with activation_memory_budget={budget:g}",
            _available,
            partial(_applied, budget=budget),
        )
        for budget in BUDGETS
    ),
    Peer(
        "inductor+checkpoint",
        "torch.compile of blocks under torch.utils.checkpoint",
        _blocks_available,
        _checkpointed,
    ),
)
