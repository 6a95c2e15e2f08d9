"""The peak of an iteration under a plan, where no allocator counts it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from belady.graph.watching import Lasting, Names
from belady.ir.hardware import Allocator


class Counted:
    """Counts the bytes that live storages hold, op by op, where no allocator does.

    Attributes
    ----------
    peak_bytes
        Most bytes held at once, each storage rounded up.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], allocator: Allocator) -> None:
        self.peak_bytes = 0
        self._allocator = allocator
        # Threads that write to disk let go of storages too: the count itself is one thread's.
        self._gone: deque[int] = deque()
        self._names = Names(self._gone.append)
        lasting = Lasting.of(modules, self._names, torch.device("cpu"))
        self._sizes = {name: allocator.held(n) for name, n in lasting.sizes.items()}
        self._held = sum(self._sizes.values())

    def start(self) -> None:
        """An op follows."""

    def seen(self, made: Iterable[Any]) -> None:
        """Count tensors from now on, for as long as they live."""
        for item in made:
            name = self._names.of(item)
            if name is not None and item.device.type == "cpu":
                nbytes = self._allocator.held(item.untyped_storage().nbytes())
                self._held += nbytes - self._sizes.get(name, 0)
                self._sizes[name] = nbytes

    def stop(self, made: tuple[Any, ...]) -> None:
        """An op was issued: count what is held now."""
        self.seen(made)
        while self._gone:
            self._held -= self._sizes.pop(self._gone.popleft(), 0)
        self.peak_bytes = max(self.peak_bytes, self._held)

    def attempt(self, run: Callable[[], Any], wanted: Any) -> None:
        """Nothing is tried, since it would count."""
