"""What autograd holds in place of a save of a planned iteration, where it is not simply kept."""

from __future__ import annotations

import torch

from belady.eager.content import Content, Kept, Saved


class PlannedSaved(Saved):
    """A handle that knows at which boundary of which iteration backward reads it; -1: never."""

    __slots__ = ("__weakref__", "iteration", "read")

    def __init__(self, tensor: torch.Tensor, content: Content, read: int, iteration: int) -> None:
        super().__init__(tensor, content)
        self.read = read
        self.iteration = iteration


class PlannedKept(Kept):
    """A handle that knows at which boundary of which iteration backward reads it; -1: never."""

    __slots__ = ("__weakref__", "iteration", "read")

    def __init__(self, tensor: torch.Tensor, read: int, iteration: int) -> None:
        super().__init__(tensor)
        self.read = read
        self.iteration = iteration
