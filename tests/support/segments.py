"""Where in torch's CUDA memory a tensor lies."""

from __future__ import annotations

import torch

GENERAL = (0, 0)  # what is in no pool of its own


def pool_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Pool of the segment that holds the bytes of ``tensor``."""
    address = tensor.untyped_storage().data_ptr()
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            first, second = segment["segment_pool_id"]
            return first, second
    raise AssertionError(f"no segment of torch's allocator holds address {address:#x}")
