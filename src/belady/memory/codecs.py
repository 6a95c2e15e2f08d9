"""Lossless encodings of saved tensors that hold few distinct values.

Masks take one bit for each element instead of eight. Integers that autograd saves as int64
(pooling indices, targets) take the narrowest type that holds their smallest and largest value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_WIDE = frozenset({torch.int16, torch.int32, torch.int64})
_RANGES = tuple(
    (dtype, torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    for dtype in (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32)
)


@dataclass(frozen=True, eq=False, slots=True)
class Encoded:
    """A tensor in fewer bytes.

    Attributes
    ----------
    codec
        ``"bits"`` or the name of the narrow type, e.g. ``"uint8"``.
    data
        What is stored: every element of the memory that the tensor spans, once.
    span
        Number of elements from the first to the last that the tensor reaches.
    dtype, shape, stride
        Geometry of the tensor, in elements.
    """

    codec: str
    data: torch.Tensor
    span: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes stored."""
        return self.data.nbytes


def encode(tensor: torch.Tensor) -> Encoded | None:
    """Encode ``tensor``, or return None where that saves no bytes or is not supported.

    On a CUDA device, the host waits for the smallest and largest value.

    Examples
    --------
    >>> encode(torch.arange(8)).nbytes, encode(torch.ones(16, dtype=torch.bool)).nbytes
    (8, 2)
    >>> encode(torch.ones(8)) is None
    True
    """
    if not _supported(tensor):
        return None
    reach = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in reach)
    # The memory itself is encoded, not the view: any strides come back, overlapping ones too.
    flat = tensor.detach().as_strided((span,), (1,))
    least = min(span, tensor.numel()) * tensor.element_size()
    if tensor.dtype is torch.bool:
        codec, nbytes = "bits", -(-span // 8)
        # Bools made by reinterpreting bytes may hold others than 0 and 1: bits would be lost.
        data = _pack(flat) if nbytes < least and _is_clean(flat) else None
    else:
        narrow = _narrowest(flat)
        codec, nbytes = str(narrow).removeprefix("torch."), span * narrow.itemsize
        data = flat.to(narrow) if nbytes < least else None
    if data is None:
        return None
    return Encoded(codec, data, span, tensor.dtype, tuple(tensor.shape), tensor.stride())


def decode(encoded: Encoded) -> torch.Tensor:
    """Restore the tensor: the same bits, dtype, shape and strides, in memory of its own."""
    if encoded.codec == "bits":
        flat = _unpack(encoded.data, encoded.span)
    else:
        flat = encoded.data.to(encoded.dtype)
    return flat.as_strided(encoded.shape, encoded.stride)


def _supported(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and (tensor.dtype is torch.bool or tensor.dtype in _WIDE)
        and tensor.numel() > 0
    )


def _is_clean(flat: torch.Tensor) -> bool:
    return int(flat.view(torch.uint8).max()) <= 1


def _narrowest(flat: torch.Tensor) -> torch.dtype:
    low, high = torch.stack(torch.aminmax(flat)).tolist()
    for dtype, least, most in _RANGES:
        if least <= low and high <= most:
            return dtype
    return flat.dtype


def _pack(flat: torch.Tensor) -> torch.Tensor:
    """Byte ``i`` holds elements ``8 i`` to ``8 i + 7``, the first in the lowest bit."""
    packed = torch.zeros(-(-flat.numel() // 8), dtype=torch.uint8, device=flat.device)
    for bit in range(8):
        lane = flat[bit::8]
        packed[: lane.numel()] |= lane.to(torch.uint8) << bit
    return packed


def _unpack(packed: torch.Tensor, count: int) -> torch.Tensor:
    flat = torch.empty(count, dtype=torch.bool, device=packed.device)
    for bit in range(8):
        lane = flat[bit::8]
        lane.copy_(packed[: lane.numel()] >> bit & 1)
    return flat
