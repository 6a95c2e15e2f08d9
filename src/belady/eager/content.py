"""What autograd holds in place of what it saves."""

from __future__ import annotations

from typing import Protocol

import torch

from belady.memory.geometry import Geometry
from belady.memory.witness import demand_unchanged, witness


class Content(Protocol):
    """Bytes that are not where they were saved; `Moved` says more of each name."""

    version: int
    unread: int
    given: list[tuple[torch.Tensor, int]]
    skipped_bytes: int

    def take(self) -> torch.Tensor:
        """Give the bytes."""
        ...

    @property
    def shared(self) -> bool:
        """Whether another reader would get the same bytes."""
        ...

    def let_go(self) -> None:
        """Drop what can be had again."""
        ...


class Saved:
    """What autograd holds in place of a tensor whose bytes are elsewhere.

    Attributes
    ----------
    iteration, read
        Of which iteration under a plan it is, and where that reads it first; 0 and -1: of none.
    """

    iteration = 0
    read = -1
    __slots__ = ("content", "geometry", "shadow", "version")

    def __init__(
        self, tensor: torch.Tensor, content: Content, geometry: Geometry | None = None
    ) -> None:
        self.content = content
        self.geometry = Geometry.of(tensor) if geometry is None else geometry
        self.shadow = witness(tensor)
        self.version = self.shadow._version

    def laid_out(self, geometry: Geometry) -> torch.Tensor:
        """Give the bytes of the storage as another tensor on them.

        Raises
        ------
        StaleValueError
            If the original was changed in place after it had been saved.
        """
        self._demand_unchanged()
        content = self.content
        return geometry.on(content.take(), content.skipped_bytes)

    def _demand_unchanged(self) -> None:
        demand_unchanged(self.shadow, self.version, self.geometry.shape)
        for shadow, version in self.content.given:
            demand_unchanged(shadow, version, self.geometry.shape)

    def take(self) -> torch.Tensor:
        """Give the tensor back as it was saved.

        Raises
        ------
        StaleValueError
            As `laid_out`.
        """
        content = self.content
        tensor = self.laid_out(self.geometry)
        content.unread -= 1
        if content.unread <= 0:
            # Autograd holds what the op needs; a later read (retain_graph) brings it again.
            content.let_go()
        if content.shared:
            # A backward that writes to what it was handed would spoil it for the next reader.
            shadow = witness(tensor)
            content.given.append((shadow, shadow._version))
        return tensor


class Kept:
    """What autograd holds for a tensor that stays; a detached alias, so that nothing leaks."""

    iteration = 0
    read = -1
    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = self.tensor._version

    def laid_out(self, geometry: Geometry) -> torch.Tensor:
        """Give the bytes of the storage as another tensor on them.

        Raises
        ------
        StaleValueError
            As `take`.
        """
        return laid_out(self.take(), geometry)

    def take(self) -> torch.Tensor:
        """Give the tensor back.

        Raises
        ------
        StaleValueError
            If it was changed in place after it had been saved.
        """
        demand_unchanged(self.tensor, self.version)
        return self.tensor


def laid_out(tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """``tensor``, or another one on the same bytes if it lies on them in another way."""
    if geometry.is_of(tensor):
        return tensor
    return geometry.beside(tensor)


def unpack(handle: Saved | Kept) -> torch.Tensor:
    """The unpack hook: whatever was packed gives its tensor back."""
    return handle.take()
