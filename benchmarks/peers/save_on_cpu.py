"""torch.autograd.graph.save_on_cpu with pinned memory: every saved tensor, without overlap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch.autograd.graph import save_on_cpu

from benchmarks.peers.base import Applied, Peer, always, blocks_wrapped, needs_blocks
from benchmarks.peers.checkpoint import checkpointed
from benchmarks.workloads import Workload


def _around(work: Workload) -> partial[save_on_cpu]:
    return partial(save_on_cpu, pin_memory=work.setting.device == "cuda")


@contextmanager
def _applied(work: Workload) -> Iterator[Applied]:
    yield Applied(work.model, _around(work))


@contextmanager
def _with_checkpoint(work: Workload) -> Iterator[Applied]:
    """What blocks take as input goes to the host; what they save inside is computed again."""
    with blocks_wrapped(work, checkpointed):
        yield Applied(work.model, _around(work))


PEERS = (
    Peer("save_on_cpu", "torch.autograd.graph.save_on_cpu(pin_memory=True)", always, _applied),
    Peer(
        "checkpoint+save_on_cpu",
        "torch.utils.checkpoint inside save_on_cpu(pin_memory=True)",
        needs_blocks,
        _with_checkpoint,
    ),
)
