"""torch.compile: Inductor as it comes, with torch's own budget for what is saved, and checkpointed.

``activation_memory_budget`` is a share of the bytes that the partitioner would save, not of the
peak. Fusion changes bits, so that results need not equal plain's. Each issued op by op, and some
launched as CUDA graphs too, as with ``mode="reduce-overhead"``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch._functorch.config

from benchmarks.cases import LAUNCHED
from benchmarks.peers.base import Applied, Peer, blocks_wrapped, missing, needs_blocks, needs_cuda
from benchmarks.peers.checkpoint import checkpointed
from benchmarks.workloads import Workload

BUDGETS = (0.7, 0.5, 0.25, 0.0)
_GRAPHS = "reduce-overhead"


def _available(work: Workload) -> str | None:
    if work.setting.device == "cuda":
        return missing("triton")
    return None if shutil.which("g++") else "Inductor needs a C++ compiler on a CPU"


@contextmanager
def _applied(work: Workload, budget: float, graphs: bool = False) -> Iterator[Applied]:
    # Compiled code holds on to the model; what an earlier budget compiled is of no use either.
    torch._dynamo.reset()
    try:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            if graphs:
                yield Applied(torch.compile(work.model, mode=_GRAPHS), _marked)
            else:
                yield Applied(torch.compile(work.model))
    finally:
        # It also gives back what CUDA graphs keep.
        torch._dynamo.reset()


@contextmanager
def _marked() -> Iterator[None]:
    # Else torch guesses where an iteration begins.
    torch.compiler.cudagraph_mark_step_begin()
    yield


def _blocks_available(work: Workload) -> str | None:
    return needs_blocks(work) or _available(work)


@contextmanager
def _checkpointed(work: Workload, graphs: bool = False) -> Iterator[Applied]:
    # Inside of what is compiled: its partitioner makes again what a block makes, fused.
    with blocks_wrapped(work, checkpointed), _applied(work, 1.0, graphs) as applied:
        yield applied


def _launched(peer: Peer) -> Peer:
    """The same in CUDA graphs, which need a GPU."""
    return Peer(
        peer.name + LAUNCHED,
        f"{peer.source}, mode={_GRAPHS}",
        lambda work: needs_cuda(work) or peer.available(work),
        partial(peer.applied, graphs=True),
        anew=True,
    )


_ISSUED = (
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
PEERS = (*_ISSUED, *(_launched(peer) for peer in _ISSUED))
