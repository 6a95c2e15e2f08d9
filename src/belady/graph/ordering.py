"""Puts backwards of graphs in the coordinated order: for Layrub's policies, or where it must be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from belady.graph.captured import Captured
from belady.graph.coordinated import coordinated
from belady.graph.joint import Joint
from belady.ordered.told import BY_NEED, BY_POLICY, said
from belady.planners import traits_of
from belady.planners.traits import Coordinated


class Ordering:
    """The graphs whose backward goes in the coordinated order.

    Attributes
    ----------
    said
        What a user should know of it, one sentence.
    """

    def __init__(self, policy: str) -> None:
        self.said: list[str] = []
        self._order = traits_of(policy).coordinated
        self._ordered: set[Captured] = set()

    def begin(self, graph: Captured) -> None:
        """Order a graph of which nothing has run, if the policy always does."""
        if self._order is Coordinated.ALWAYS and graph not in self._ordered:
            self._put(graph)
            self.said = [said(BY_POLICY)]

    def may_help(self, graph: Captured) -> bool:
        """Whether a graph that does not fit may be tried in the order."""
        return self._order is Coordinated.AS_NEEDED and graph not in self._ordered

    @contextmanager
    def tried(self, graph: Captured) -> Iterator[None]:
        """Order a graph of which nothing has run, unless the body raises."""
        before = self._put(graph)
        try:
            yield
        except BaseException:
            graph.put(before)
            self._ordered.discard(graph)
            raise
        self.said = [said(BY_NEED)]

    def _put(self, graph: Captured) -> Joint:
        joint = graph.joint
        if joint is None:
            raise RuntimeError("a graph that was not cut cannot be ordered")
        graph.put(coordinated(joint, graph.layout))
        self._ordered.add(graph)
        return joint
