"""How a tensor lies on its storage, and how to lay it out again on other bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

# Tensors made here must be plain: no grad history, and unseen by the user's dispatch modes.
below_autograd = torch._C._AutoDispatchBelowAutograd
unseen = torch._C._DisableTorchDispatch
# What is made below it is no view in autograd's eyes: it has a version counter of its own.
below_views = torch._C._AutoDispatchBelowADInplaceOrView
# Above zero where a dispatch mode would see. To ask is much cheaper than to make sure.
seen = torch._C._len_torch_dispatch_stack

_NOTHING: dict[torch.device, torch.Tensor] = {}
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Geometry(NamedTuple):
    """Everything but the bytes of a strided tensor; ``offset`` and ``stride`` in elements."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """Read the geometry of ``tensor``."""
        return cls(
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies on its storage in this way."""
        return (
            tensor.shape == self.shape
            and tensor.dtype is self.dtype
            and tensor.stride() == self.stride
            and tensor.storage_offset() == self.offset
            and tensor.is_conj() == self.conj
            and tensor.is_neg() == self.neg
        )

    def on(self, content: torch.Tensor, skipped_bytes: int = 0) -> torch.Tensor:
        """Lay the tensor out on ``content``, the bytes of its storage from ``skipped_bytes`` on."""
        if seen():
            with unseen():
                return self._on(content, skipped_bytes)
        return self._on(content, skipped_bytes)

    def beside(self, tensor: torch.Tensor) -> torch.Tensor:
        """Lay the tensor out on the storage of ``tensor``, whose bytes are all there."""
        if (
            tensor.dtype is self.dtype
            and type(tensor) in _PLAIN
            and not (self.conj or self.neg or tensor.is_conj() or tensor.is_neg() or seen())
        ):
            with below_views():
                return tensor.as_strided(self.shape, self.stride, self.offset)
        return self.on(content_of(tensor, 0, tensor.untyped_storage().nbytes()))

    def _on(self, content: torch.Tensor, skipped_bytes: int) -> torch.Tensor:
        # The original bytes lie where they always did; those brought back have a storage of their
        # own, which begins with them.
        size, start = self.dtype.itemsize, content.storage_offset()
        offset = self.offset + (start - skipped_bytes) // size
        with below_views():
            if start % size or content.numel() % size:
                # Made as bytes: not every type can be filled, which deterministic mode would do.
                tensor = torch.empty(0, dtype=torch.uint8, device=content.device).view(self.dtype)
                tensor.set_(content.untyped_storage(), offset, self.shape, self.stride)
            else:
                tensor = content.view(self.dtype).as_strided(self.shape, self.stride, offset)
            if self.conj:
                tensor = torch._conj(tensor)
            if self.neg:
                tensor = torch._neg_view(tensor)
        return tensor

    def span(self) -> tuple[int, int]:
        """First and one past the last byte of the storage that the tensor can reach."""
        if 0 in self.shape:
            return 0, 0
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        size = self.dtype.itemsize
        return self.offset * size, (self.offset + reach + 1) * size


def content_of(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Bytes ``start`` to ``stop`` of the tensor's storage, as a uint8 tensor that shares them."""
    if seen():
        with unseen():
            return _content_of(tensor, start, stop)
    return _content_of(tensor, start, stop)


def _content_of(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    nothing = nothing_on(tensor.device)
    with below_views():
        # A view of nothing is a tensor of its own, and takes a CUDA host less than to allocate.
        content = nothing.view(-1)
        return content.set_(tensor.untyped_storage(), start, (stop - start,), (1,))


def nothing_on(device: torch.device) -> torch.Tensor:
    """No bytes on ``device``, the same ones at every call; to be called unseen."""
    nothing = _NOTHING.get(device)
    if nothing is None:
        # For all times: a tensor of inference mode could not be used outside of it.
        with torch.inference_mode(False):
            nothing = _NOTHING[device] = torch.empty(0, dtype=torch.uint8, device=device)
    return nothing


def steps_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of the dimensions with several places: those of others say nothing."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(stride for size, stride in pairs if size != 1)


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of ``tensor``; empty for a nested tensor that has none."""
    nested = tensor.is_nested and tensor.layout is torch.strided
    return () if nested else tuple(tensor.shape)


def dense(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor of ``shape`` without gaps, in the order of those of another."""
    found, elements = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda it: (stride[it], -it)):
        found[dim] = elements
        elements *= shape[dim]
    return tuple(found)


def movable(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether the tensor's bytes may be moved and brought back by belady.

    Anything else (subclass, sparse, nested, quantized, functorch wrapper, other device, no bytes)
    passes through untouched.
    """
    return (
        type(tensor) in _PLAIN
        and tensor.device == device
        and device.type in ("cpu", "cuda")
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not tensor._is_zerotensor()
        and tensor.untyped_storage().nbytes() > 0
    )
