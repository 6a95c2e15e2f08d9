"""A call with other sizes, so that a trace of it shows where the samples are, or the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from belady.memory.geometry import dense, shape_of

# Of two tokens, one less would be one, which broadcasts.
_FEWEST = 3


@dataclass(frozen=True)
class Resized:
    """How to resize every tensor of a call.

    Attributes
    ----------
    along
        0 for other samples, 1 for other tokens.
    samples
        As the call has them.
    counts
        Samples, or tokens, as the call has them and as they are to be.
    """

    along: int
    samples: int
    counts: tuple[int, int]

    @property
    def comes_again(self) -> bool:
        """Whether a first dimension may have all of them several times: tokens, each sample's."""
        return self.along > 0

    def shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The other shape of a tensor."""
        here, there = self.counts
        shape = list(shape_of(tensor))
        if not self.along:
            return (there, *shape[1:])
        if shape[:2] == [self.samples, here]:
            return (shape[0], there, *shape[2:])
        # A mask, a table of rotations: wherever there are as many.
        return tuple(there if size == here else size for size in shape)

    def empty(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the other shape, laid out as ``tensor`` is."""
        shape, stride = self.shape(tensor), tuple(map(int, tensor.stride()))
        if shape[1:] != shape_of(tensor)[1:]:
            stride = dense(shape, stride)
        made = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
        return made.requires_grad_(tensor.requires_grad)


def more_samples(call: tuple[Any, Any]) -> Resized | None:
    """One sample more; None where tensors of the call do not all have as many."""
    samples = samples_of(call)
    return Resized(0, samples, (samples, samples + 1)) if samples else None


def fewer_tokens(call: tuple[Any, Any]) -> Resized | None:
    """One token less; None where the first tensor that could have tokens has too few."""
    samples, tokens = next((shape[:2] for shape in _shapes(call) if len(shape) > 1), (0, 0))
    return Resized(1, samples, (tokens, tokens - 1)) if tokens >= _FEWEST else None


def samples_of(call: tuple[Any, Any]) -> int:
    """Samples of a call; 0 where its tensors do not all have as many."""
    sizes = {shape[:1] for shape in _shapes(call)}
    return sizes.pop()[0] if len(sizes) == 1 and sizes != {()} else 0


def _shapes(call: tuple[Any, Any]) -> Iterator[tuple[int, ...]]:
    for leaf in tree_leaves(call):
        if isinstance(leaf, torch.Tensor):
            yield shape_of(leaf)
