"""Lossless encodings of saved tensors that hold few distinct values.

Masks take one bit for each element instead of eight. Integers that autograd saves as int64
(pooling indices, targets) take the narrowest type that holds their smallest and largest value. Of
what a ReLU saves the signs are enough, where a plan knows that nothing else reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from belady.ir.codecs import BITS, PIECE, SIGN

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_WIDE = frozenset({torch.int16, torch.int32, torch.int64})
_RANGES = tuple(
    (dtype, torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    for dtype in (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32)
)


# Byte ``j`` of a word goes to its highest byte, shifted by ``j``; nothing else reaches that byte.
_GATHERED = 0x0102040810204080
# A byte goes to each byte of a word, of which byte ``j`` keeps bit ``j``.
_SPREAD, _OWN_BIT = 0x0101010101010101, 0x8040201008040201 - 2**64


@dataclass(frozen=True, eq=False, slots=True)
class Encoded:
    """A tensor in fewer bytes.

    Attributes
    ----------
    codec
        ``"bits"``, ``"sign"`` or the name of the narrow type, e.g. ``"uint8"``.
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
    flat = _flat(tensor)
    span = flat.numel()
    least = min(span, tensor.numel()) * tensor.element_size()
    if tensor.dtype is torch.bool:
        codec, nbytes = BITS, -(-span // 8)
        # Bools made by reinterpreting bytes may hold others than 0 and 1: bits would be lost.
        data = _pack(flat) if nbytes < least and _is_clean(flat) else None
    else:
        narrow = _narrowest(flat)
        codec, nbytes = str(narrow).removeprefix("torch."), span * narrow.itemsize
        data = flat.to(narrow) if nbytes < least else None
    if data is None:
        return None
    return Encoded(codec, data, span, tensor.dtype, tuple(tensor.shape), tensor.stride())


def encode_as(codec: str, tensor: torch.Tensor) -> Encoded:
    """Encode ``tensor`` as a plan says; the host waits for nothing and no element is looked at.

    Parameters
    ----------
    codec
        One that gives back all that is asked for, see `belady.ir.encoding`.
    """
    flat = _flat(tensor)
    if codec == SIGN:
        data = _signs(flat)
    elif codec == BITS:
        data = _pack(flat)
    else:
        data = flat.to(getattr(torch, codec))
    return Encoded(codec, data, flat.numel(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def decode(encoded: Encoded) -> torch.Tensor:
    """Restore the tensor: the same bits, dtype, shape and strides, in memory of its own.

    Of signs come back 0, where an element was at most 0, and 1.
    """
    if encoded.codec in (BITS, SIGN):
        flat = _unpacked(encoded, torch.eq if encoded.codec == SIGN else torch.ne)
    else:
        flat = encoded.data.to(encoded.dtype)
    return flat.as_strided(encoded.shape, encoded.stride)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that the tensor spans: any strides come back, overlapping ones too."""
    reach = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in reach)
    return tensor.detach().as_strided((span,), (1,))


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
    return _packed(flat.numel(), flat.device, lambda at, stop: flat[at:stop].clone())


def _signs(flat: torch.Tensor) -> torch.Tensor:
    """Bits that say which elements are at most 0: a gradient passes through a NaN."""
    return _packed(flat.numel(), flat.device, lambda at, stop: flat[at:stop] <= 0)


def _packed(
    count: int, device: torch.device, piece: Callable[[int, int], torch.Tensor]
) -> torch.Tensor:
    """Bits of ``count`` bools, which ``piece`` makes in memory of their own."""
    packed = torch.empty(-(-count // 8), dtype=torch.uint8, device=device)
    for at in range(0, count, PIECE):
        bools = piece(at, min(count, at + PIECE))
        if bools.numel() % 8:
            bools = torch.nn.functional.pad(bools, (0, -bools.numel() % 8))
        # Eight bytes of 0 or 1 are a word; times this, its highest byte has a bit of each.
        words = bools.view(torch.int64).mul_(_GATHERED)
        packed[at // 8 : at // 8 + words.numel()] = words.view(torch.uint8)[7::8]
    return packed


def _unpacked(encoded: Encoded, against_zero: Callable[..., object]) -> torch.Tensor:
    """Whether each bit, ``against_zero``, holds: 0 or 1 of the tensor's type."""
    packed = encoded.data
    found = torch.empty(8 * packed.numel(), dtype=encoded.dtype, device=packed.device)
    for at in range(0, packed.numel(), PIECE // 8):
        words = packed[at : at + PIECE // 8].to(torch.int64).mul_(_SPREAD).bitwise_and_(_OWN_BIT)
        bits = words.view(torch.uint8)
        against_zero(bits, 0, out=found[8 * at : 8 * at + bits.numel()])
    return found[: encoded.span]
