"""What counts as running out of the device's memory."""

import pytest
import torch

from belady.memory.allowance import ran_out


@pytest.mark.parametrize(
    ("error", "did"),
    [
        (torch.OutOfMemoryError("too little"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("GET was unable to find an engine to execute this computation"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("this budget is out of memory's range"), False),
        (KeyboardInterrupt("out of memory"), False),
    ],
)
def test_an_error_says_so(error: BaseException, did: bool) -> None:
    assert ran_out(error) is did
