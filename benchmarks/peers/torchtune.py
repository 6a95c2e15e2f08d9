"""torchtune's OffloadActivations, from which TRL's comes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from benchmarks.peers.base import Applied, Peer, hooks_as_found, missing, needs_cuda
from benchmarks.workloads import Workload


def _available(work: Workload) -> str | None:
    return needs_cuda(work) or missing("torchtune", "torchao") or _refused()


@cache
def _refused() -> str | None:
    """Why the package cannot be imported: it does not go with every torchao."""
    try:
        import torchtune.training  # noqa: F401
    except Exception as error:
        return f"torchtune cannot be imported: {type(error).__name__}: {str(error).strip()[:200]}"
    return None


@contextmanager
def _applied(work: Workload) -> Iterator[Applied]:
    from torchtune.training import get_act_offloading_ctx_manager

    with hooks_as_found(work.model):
        offload = get_act_offloading_ctx_manager(work.model, True)
        yield Applied(work.model, lambda: offload)


PEERS = (
    Peer("torchtune", "torchtune.training.OffloadActivations, defaults", _available, _applied),
)
