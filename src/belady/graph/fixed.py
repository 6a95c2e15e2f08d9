"""What a plan moves, keeps and places in a part that is captured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from belady.graph.contents import Content, Contents
from belady.graph.doors import fake_value
from belady.graph.launchable import storage_of
from belady.memory.geometry import Geometry


class FixedContents(Contents):
    """Contents of a launch: results are copies, and inputs that lie still are watched apart."""

    def hold(self, value: int, tensor: torch.Tensor, guarded: bool) -> Content:
        """Begin to manage a storage."""
        return super().hold(value, tensor, guarded=False)


class Checked(NamedTuple):
    """What a program watches for changes between forward and backward."""

    given: int | None
    result: int | None

    @classmethod
    def each(
        cls, saved: Iterable[torch.Tensor], given: Sequence[Any], results: Sequence[Any]
    ) -> list[Checked]:
        """What each tensor that was saved is, of what was given or results."""
        numbers, places = _firsts(given), _firsts(results)
        names = map(storage_of, saved)
        return [cls(numbers.get(name), places.get(name)) for name in names]

    def among(self, args: list[Any], results: list[Any]) -> torch.Tensor:
        """A tensor that shares its version."""
        number = self.given
        it = results[self.result or 0] if number is None else args[number]
        assert isinstance(it, torch.Tensor)
        return it.detach()


def _firsts(values: Sequence[Any]) -> dict[int, int]:
    """The first place of each storage."""
    return {storage_of(values[place]): place for place in reversed(range(len(values)))}


class Owed:
    """Lives as long as the backward of the last launch of forward may still come.

    Attributes
    ----------
    read
        Inputs that forward has read where they lie.
    held
        The bytes of those that do not last.
    """

    def __init__(self) -> None:
        self.read, self.held = list[torch.Tensor](), list[torch.Tensor]()


class Places:
    """Memory of its own for each large gradient, see `belady.graph.placing`."""

    def __init__(self, nodes: Sequence[fx.Node], device: torch.device) -> None:
        self._wanted, self._device = [fake_value(node) for node in nodes], device
        self._free: list[torch.Tensor] = []

    def take(self) -> None:
        """Take it."""
        self._free = [like(it, self._device) for it in self._wanted]

    def give(self, gradient: torch.Tensor) -> torch.Tensor:
        """Copy a gradient to its place."""
        lies = Geometry.of(gradient)
        for place in self._free:
            if lies.is_of(place):
                self._free = [it for it in self._free if it is not place]
                return place.copy_(gradient)
        return gradient

    def clear(self) -> None:
        """Hold nothing."""
        self._free = []


class Kept:
    """A content as it was when forward had ended, without holding bytes of the pool."""

    def __init__(self, content: Content, seen: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._bytes = content.bytes.without_holding(seen)
        self._content = copy.copy(content)
        del self._content.bytes

    def again(self, contents: Contents) -> Content:
        """It, managed anew."""
        content = copy.copy(self._content)
        content.bytes = copy.copy(self._bytes)
        contents.go_on(content)
        return content


def like(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A tensor that lies as another one, with bytes of its own.

    Nobody fills them, as deterministic algorithms have it: what is captured would do so again in
    each launch, also where somebody has written to them in between.
    """
    device = device or tensor.device
    _, nbytes = Geometry.of(tensor)._replace(offset=0).span()
    bytes_ = torch.UntypedStorage(nbytes, device=device)  # type: ignore[no-untyped-call]
    made = torch.empty(0, dtype=torch.uint8, device=device).view(tensor.dtype)
    return made.set_(bytes_, 0, tensor.shape, tensor.stride())


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that lies as the original."""
    return like(tensor).copy_(tensor)
