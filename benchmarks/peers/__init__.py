"""Peers by name: one file each, all behind the contract in `benchmarks.peers.base`."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.peers import (
    checkpoint,
    compiled,
    deepspeed,
    plain,
    save_on_cpu,
    selective,
    torchtune,
    trl,
)
from benchmarks.peers.base import Applied, Peer

__all__ = ["PEERS", "Applied", "Peer"]

_MODULES = (plain, checkpoint, save_on_cpu, selective, trl, torchtune, deepspeed, compiled)
PEERS: Mapping[str, Peer] = {peer.name: peer for module in _MODULES for peer in module.PEERS}
