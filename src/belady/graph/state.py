"""What a call of a captured graph runs as, who watches it, and what it leaves for its backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from belady.graph.captured import Captured
from belady.graph.contents import Contents
from belady.graph.program import Program
from belady.memory.witness import demand_unchanged


class Watch(Protocol):
    """Sees every op of a program that is watched, and what the op makes."""

    def start(self) -> None:
        """An op follows."""
        ...

    def stop(self, made: tuple[Any, ...]) -> None:
        """It was issued."""
        ...

    def seen(self, made: tuple[Any, ...]) -> None:
        """Tensors came back, or were made again."""
        ...

    def attempt(self, run: Callable[[], Any], wanted: Any) -> None:
        """There is ``run``, perhaps a cheaper way to ``wanted``, which the last op has made."""
        ...


@dataclass(frozen=True, slots=True)
class Turn:
    """How one call of a graph runs: with which code, and on whose contents.

    ``tag`` is the host's own.
    """

    program: Program
    contents: Contents | None = None
    watch: Watch | None = None
    tag: Any = None


class State:
    """What one call of a forward leaves for its backward; lives as long as autograd's graph."""

    def __init__(
        self, graph: Captured, turn: Turn, saved: list[Any], versions: tuple[int, ...]
    ) -> None:
        self.graph = graph
        self.turn = turn
        self._saved: list[Any] | None = saved
        self._versions = versions

    def outside(self) -> list[torch.Tensor]:
        """What was saved of inputs and results, which others may hold too."""
        saved = self._saved or []
        return [saved[place] for place in self.turn.program.checked[: len(saved)]]

    def take(self, *, keep: bool) -> list[Any]:
        """Give what was saved, in a list of the caller's own; for the last time unless ``keep``.

        Raises
        ------
        StaleValueError
            If a saved input or result was changed in place since.
        """
        saved = self._saved
        if saved is None:
            raise RuntimeError("what forward saved was taken before")
        checked = [saved[place] for place in self.turn.program.checked]
        if tuple([it._version for it in checked]) != self._versions:
            for tensor, version in zip(checked, self._versions, strict=True):
                demand_unchanged(tensor, version)
        if keep:
            return list(saved)
        self._saved = None
        return saved
