"""How a tensor lies on its storage, and how to lay it out again on other bytes."""

from __future__ import annotations

from typing import NamedTuple

import torch

# Tensors made here must be plain: no grad history, and unseen by the user's dispatch modes.
below_autograd = torch._C._AutoDispatchBelowAutograd
unseen = torch._C._DisableTorchDispatch

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

    def on(self, content: torch.Tensor, skipped_bytes: int = 0) -> torch.Tensor:
        """Lay the tensor out on ``content``, the bytes of its storage from ``skipped_bytes`` on."""
        # The original bytes lie where they always did; those brought back have a storage of their
        # own, which begins with them.
        moved = content.storage_offset() - skipped_bytes
        offset = self.offset + moved // self.dtype.itemsize
        with unseen(), below_autograd():
            # Made as bytes: not every type can be filled, which deterministic mode would do.
            tensor = torch.empty(0, dtype=torch.uint8, device=content.device).view(self.dtype)
            tensor.set_(content.untyped_storage(), offset, self.shape, self.stride)
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
    with unseen(), below_autograd():
        content = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return content.set_(tensor.untyped_storage(), start, (stop - start,), (1,))


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of ``tensor``; empty for a nested tensor that has none."""
    nested = tensor.is_nested and tensor.layout is torch.strided
    return () if nested else tuple(tensor.shape)


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
