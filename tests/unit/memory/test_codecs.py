"""Codecs give back the same bits in the same layout, or decline."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from belady.memory import codecs
from belady.memory.codecs import decode, encode, encode_as


def assert_restores(tensor: torch.Tensor) -> None:
    encoded = encode(tensor)
    if encoded is None:
        return
    assert encoded.nbytes < tensor.numel() * tensor.element_size()
    back = decode(encoded)
    assert back.dtype is tensor.dtype
    assert back.shape == tensor.shape
    assert back.stride() == tensor.stride()
    assert torch.equal(back, tensor)


@st.composite
def layouts(draw: st.DrawFn) -> torch.Tensor:
    """Draw a bool or integer tensor seen through slices, permutations and expansions."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    dtype: torch.dtype = draw(st.sampled_from([torch.bool, torch.int16, torch.int32, torch.int64]))
    low = draw(st.integers(-300, 300) | st.integers(-(2**40), 2**40))
    width = draw(st.integers(0, 300) | st.integers(0, 2**40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensor = torch.randint(low, low + width + 1, shape, generator=generator)
    tensor = tensor % 2 == 0 if dtype is torch.bool else tensor.to(dtype)
    order = draw(st.permutations(range(len(shape))))
    tensor = tensor.permute(order)
    sliced = draw(st.booleans())
    if shape and sliced:
        tensor = tensor[draw(st.integers(0, 2)) :: draw(st.integers(1, 2))]
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(draw(st.integers(0, 4)), *tensor.shape)
    return tensor


@given(layouts())
def test_any_layout_comes_back(tensor: torch.Tensor) -> None:
    assert_restores(tensor)


@pytest.mark.parametrize("count", [2, 7, 8, 9, 63, 64, 65, 1001])
def test_bits(count: int) -> None:
    mask = torch.arange(count) % 3 == 0
    encoded = encode(mask)
    assert encoded is not None
    assert (encoded.codec, encoded.nbytes) == ("bits", -(-count // 8))
    assert_restores(mask)


@pytest.mark.parametrize(
    ("low", "high", "codec"),
    [
        (0, 255, "uint8"),
        (0, 256, "uint16"),
        (0, 2**16 - 1, "uint16"),
        (0, 2**16, "uint32"),
        (0, 2**32 - 1, "uint32"),
        (-128, 127, "int8"),
        (-129, 0, "int16"),
        (-1, 128, "int16"),
        (-1, 2**15, "int32"),
        (-(2**31), 2**31 - 1, "int32"),
    ],
)
def test_narrowest_type_that_holds_the_range(low: int, high: int, codec: str) -> None:
    tensor = torch.tensor([low, high, high, low])
    encoded = encode(tensor)
    assert encoded is not None
    assert encoded.codec == codec
    assert_restores(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([0, 2**32]),
        torch.tensor([-1, 2**31]),
        torch.tensor([-(2**63), 2**63 - 1]),
        torch.tensor([1000], dtype=torch.int16),
        torch.ones(8),
        torch.ones(8, dtype=torch.uint8),
        torch.tensor(True),
        torch.empty(0, dtype=torch.int64),
        torch.zeros(3, dtype=torch.int64, device="meta"),
        torch.zeros(3, dtype=torch.int64).to_sparse(),
        torch.zeros(1000, dtype=torch.bool)[::9],
    ],
    ids=str,
)
def test_declines(tensor: torch.Tensor) -> None:
    assert encode(tensor) is None


def test_channels_last_pooling_indices() -> None:
    image = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    _, indices = torch.nn.functional.max_pool2d(image, 2, return_indices=True)
    encoded = encode(indices)
    assert encoded is not None
    assert encoded.nbytes * 8 == indices.nbytes
    assert_restores(indices)
    assert decode(encoded).is_contiguous(memory_format=torch.channels_last)


def test_expanded_is_stored_once() -> None:
    encoded = encode(torch.arange(100).expand(50, 100))
    assert encoded is not None
    assert encoded.nbytes == 100


def test_scalar_and_parameter() -> None:
    assert_restores(torch.tensor(5))
    assert_restores(torch.nn.Parameter(torch.arange(9), requires_grad=False))


def test_decoded_memory_is_its_own() -> None:
    tensor = torch.arange(10)
    encoded = encode(tensor)
    assert encoded is not None
    decode(encoded).zero_()
    tensor.zero_()
    assert torch.equal(decode(encoded), torch.arange(10))


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("piece", [codecs.PIECE, 24])
def test_of_signs_comes_back_what_the_gradient_of_a_relu_asks(
    dtype: torch.dtype, piece: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codecs, "PIECE", piece)
    odd = [0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-38, -1e-38, 6e-8]
    for count in (1, 7, 8, 9, 24, 25, 100):
        generator = torch.Generator().manual_seed(count)
        values = torch.randn(count, generator=generator).to(dtype)
        values[: len(odd)] = torch.tensor(odd, dtype=dtype)[:count]
        values = values.to(device)
        encoded = encode_as("sign", values)
        assert encoded.nbytes == -(-count // 8)
        back, gradient = decode(encoded), torch.randn(count, generator=generator).to(values)
        assert (back.dtype, back.device, back.shape) == (dtype, values.device, values.shape)
        asked = torch.ops.aten.threshold_backward.default
        assert torch.equal(asked(gradient, back, 0), asked(gradient, values, 0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("piece", [codecs.PIECE, 64])
@pytest.mark.parametrize("codec", ["bits", "uint8", "uint16", "int32"])
def test_as_a_plan_says(
    codec: str, piece: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codecs, "PIECE", piece)
    most = {"bits": 2, "uint8": 1 << 8, "uint16": 1 << 16, "int32": 1 << 31}[codec]
    tensor = torch.randint(0, most, (3, 5, 67), device=device)
    tensor.view(-1)[0], tensor.view(-1)[1] = 0, most - 1
    tensor = tensor.permute(2, 0, 1)
    tensor = tensor.bool() if codec == "bits" else tensor
    encoded = encode_as(codec, tensor)
    size = -(-tensor.numel() // 8) if codec == "bits" else tensor.numel() * encoded.data.itemsize
    assert encoded.nbytes == size
    back = decode(encoded)
    assert back.stride() == tensor.stride()
    assert torch.equal(back, tensor)


@pytest.mark.gpu
@given(layouts())
def test_any_layout_comes_back_on_a_gpu(tensor: torch.Tensor) -> None:
    on_gpu = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
    if 0 not in tensor.stride():
        on_gpu.copy_(tensor)
        assert_restores(on_gpu)
    assert_restores(tensor.cuda())
