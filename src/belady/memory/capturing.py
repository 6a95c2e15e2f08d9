"""What captures what is issued to a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from belady.memory.filling import Filling
from belady.simulate.holes import Holes
from belady.simulate.stretch import Event
from belady.units import format_bytes

T = TypeVar("T")


class LackingError(RuntimeError):
    """There is no room for blocks that are packed: so many bytes are lacking."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(f"packed blocks have no room: {format_bytes(nbytes)} are lacking")
        self.nbytes = nbytes


class Capturing(Protocol):
    """`belady.memory.launches.Launches`, or what stands for it where there is no GPU.

    Attributes
    ----------
    holes
        Bytes of each hole that the pool begins with; None where it grows as it is used.
    peak_bytes
        Most bytes that the device held, once all is captured.
    """

    holes: Holes | None
    peak_bytes: int

    @property
    def reserved_bytes(self) -> int:
        """What the device's allocator reserves."""
        ...

    def capture(self, issue: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """What launches all that ``issue`` issues, and what it gives."""
        ...

    def divide(self) -> Filling | None:
        """Have the pool begin here, in the first capture; what has blocks lie as packed."""
        ...

    def seen(self, tensor: torch.Tensor) -> torch.Tensor:
        """The bytes of a tensor that a capture gave, or reads, without holding them."""
        ...

    def follow(self) -> None:
        """Have the current stream wait for what was launched."""
        ...

    def over(self) -> None:
        """All is captured."""
        ...

    def lend(self) -> Callable[[], bool]:
        """Have this thread use what is idle of the pool until what is given is called."""
        ...

    def has_room_for(self, events: Sequence[Event]) -> bool:
        """Whether blocks that come and go in this order fit into what is idle of the pool."""
        ...

    def wait(self) -> None:
        """Wait for what was launched."""
        ...

    def forget(self) -> None:
        """What was captured is gone."""
        ...
