"""What autograd holds in place of a save of a planned iteration, where it is not simply kept."""

from __future__ import annotations

import torch

from belady.eager.content import Content, Kept, Saved, laid_out
from belady.eager.replay import Recomputed
from belady.memory.contents import Moved, Packed
from belady.memory.geometry import Geometry


class PlannedSaved(Saved):
    """A handle that knows at which boundary of which iteration backward reads it; -1: never."""

    __slots__ = ("__weakref__", "iteration", "read")

    def __init__(
        self,
        tensor: torch.Tensor,
        content: Content,
        geometry: Geometry | None,
        read: int,
        iteration: int,
    ) -> None:
        super().__init__(tensor, content, geometry)
        self.read = read
        self.iteration = iteration


class PlannedAgain(PlannedSaved):
    """One whose content gives the value made again, which most often lies as it is asked for."""

    __slots__ = ()

    def laid_out(self, geometry: Geometry) -> torch.Tensor:
        """See `Saved.laid_out`."""
        self._demand_unchanged()
        return laid_out(self.content.take(), geometry)


class PlannedKept(Kept):
    """A handle that knows at which boundary of which iteration backward reads it; -1: never."""

    __slots__ = ("__weakref__", "iteration", "read")

    def __init__(self, tensor: torch.Tensor, read: int, iteration: int) -> None:
        super().__init__(tensor)
        self.read = read
        self.iteration = iteration


def is_of(content: Moved | Packed | Recomputed, tensor: torch.Tensor) -> bool:
    """Whether ``content`` has the bytes of ``tensor``, at the version that it has now."""
    if content.identity is None or content.identity.cdata != tensor.untyped_storage()._cdata:
        return False
    if isinstance(content, Packed) and content.dtype is not tensor.dtype:
        return False
    return content.version == tensor._version
