"""What a part that is captured reads and writes lies where it lay then."""

from __future__ import annotations

import pytest
import torch

from belady.graph.fixed import copied, like
from tests.support.training import repeatable

MANY = 1 << 22
LYING = [
    torch.arange(24.0).reshape(2, 3, 4),
    torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2),
    torch.arange(24.0)[2:14:3],
    torch.arange(6.0).reshape(6, 1).expand(6, 3),
    torch.empty(0, 3),
    torch.tensor(1, dtype=torch.int64),
]


@pytest.mark.parametrize("tensor", LYING, ids=lambda it: f"{it.dtype}{tuple(it.stride())}")
def test_a_tensor_lies_as_another_one_with_bytes_of_its_own(tensor: torch.Tensor) -> None:
    made = like(tensor)
    assert (made.dtype, made.shape, made.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert made.storage_offset() == 0
    assert not tensor.nbytes or made.data_ptr() != tensor.data_ptr()
    if 0 not in tensor.stride():
        assert torch.equal(copied(tensor), tensor)


def test_nobody_fills_it() -> None:
    """A launch would, each time, over what was written to it in between."""
    with repeatable():
        filled = torch.empty(MANY)
        assert filled.isnan().all()
        assert not like(filled).isnan().all()
