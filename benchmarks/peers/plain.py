"""Plain PyTorch: what every other method is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.peers.base import Applied, Peer, always
from benchmarks.workloads import Workload


@contextmanager
def _applied(work: Workload) -> Iterator[Applied]:
    yield Applied(work.model)


PEERS = (Peer("plain", "torch, eager", always, _applied),)
