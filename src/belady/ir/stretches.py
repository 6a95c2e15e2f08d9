"""A stretch: where a section lies in a trace, and what goes into and out of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Stretch:
    """The ops of one section in one pass.

    Attributes
    ----------
    name
        For messages.
    parent
        Module whose forward calls its modules, as a trace names it.
    forward, backward
        Its ops, without the accumulation of gradients that autograd does in between.
    stages
        For each op its stage: batch norms in training mode begin one.
    norms
        Forward ops of these batch norms.
    sums
        Backward ops that add gradients of one value.
    apart
        Modules with batch norms inside, whose calls are steps of their own.
    parts
        Numbers of its slices: no other stretch of the trace has the same.
    sizes
        Samples of each slice.
    given, made
        Value that goes in and value that comes out.
    gradient
        Value that is the gradient of ``made``.
    passed_on
        Value that is the gradient of ``given``, or -1 where nobody asks for it.
    totals
        Storages of gradients of parameters.
    full
        Storages born inside of which every slice makes all.
    draws, drawn
        Forward ops that draw random numbers for all slices, and the storages of these.
    along
        Dimension of what goes in and comes out that is cut.
    scattered
        Whether rows of one slice lie apart in these.
    """

    name: str
    parent: str
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    stages: dict[int, int]
    norms: frozenset[int]
    sums: frozenset[int]
    apart: frozenset[str]
    parts: range
    sizes: tuple[int, ...]
    given: int
    made: int
    gradient: int
    passed_on: int
    totals: frozenset[int]
    full: frozenset[int]
    draws: frozenset[int]
    drawn: frozenset[int]
    along: int
    scattered: bool

    @property
    def copies(self) -> bool:
        """Whether a slice of what goes in is a copy."""
        return self.passed_on >= 0 or self.along > 0

    @cached_property
    def samples(self) -> int:
        """Samples of the batch."""
        return sum(self.sizes)

    def size(self, part: int) -> int:
        """Samples of slice ``part``."""
        return self.sizes[self.parts.index(part)]

    def start(self, part: int) -> int:
        """First sample of slice ``part``."""
        return self._starts[self.parts.index(part)]

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.sizes, initial=0))
