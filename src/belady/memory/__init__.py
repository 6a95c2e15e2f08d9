"""Tiers below the device: streams, pinned host memory, spilled bytes, lossless codecs."""

from belady.memory.carrier import Arrival, Carrier, Parcel
from belady.memory.codecs import Encoded, decode, encode
from belady.memory.disk import DiskStore
from belady.memory.fences import Fence
from belady.memory.lanes import CpuLanes, CudaLanes, Lanes, lanes_for
from belady.memory.slab import Block, HostArena
from belady.memory.staging import staging_bytes

__all__ = [
    "Arrival",
    "Block",
    "Carrier",
    "CpuLanes",
    "CudaLanes",
    "DiskStore",
    "Encoded",
    "Fence",
    "HostArena",
    "Lanes",
    "Parcel",
    "decode",
    "encode",
    "lanes_for",
    "staging_bytes",
]
