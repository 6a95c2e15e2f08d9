"""The statements of one part of a graph: what is due, ops, and what they need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import fx

from belady.errors import PlanMismatchError
from belady.graph.code import Code, NodeNames
from belady.graph.joint import Joint, Step
from belady.graph.orders import Orders
from belady.graph.replays import Replay, shortcut_of


class Writer(Protocol):
    """Who writes the two functions of a graph, and knows of one what the other asks.

    Attributes
    ----------
    made_by
        The step that makes each node.
    order
        Place of each node in the order in which they are made.
    watched
        Whether every op is to be observed.
    """

    joint: Joint
    orders: Orders
    made_by: dict[fx.Node, Step]
    order: dict[fx.Node, int]
    watched: bool

    def sources(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """What a node of forward is made again from in backward, if it is."""
        ...

    def recover(self, body: Body, node: fx.Node) -> None:
        """Have a node of forward in backward: laid out on bytes brought back, or made again."""
        ...


class Body:
    """One of the two functions in the making: statements, and what they have defined so far.

    Parameters
    ----------
    which
        0 for forward, 1 for backward.
    recoverable
        Nodes of forward that are not there and can be had.
    """

    def __init__(self, writer: Writer, which: int, recoverable: set[fx.Node]) -> None:
        orders = writer.orders
        self.code = Code()
        self.names = NodeNames(writer.joint, self.code)
        self.defined: set[fx.Node] = set(writer.joint.constants)
        self.begun: set[int] = set()
        self._writer = writer
        self.acts = (orders.forward, orders.backward)[which]
        self._scarce = orders.scarce[which]
        self._recoverable = recoverable
        self._op = 0
        # Names of what replays have made at a boundary.
        self._at, self._again = 0, dict[fx.Node, str]()

    def unpack(self, source: str, names: list[str]) -> None:
        """Bind the items of a list and empty it."""
        if names:
            self.code.add(f"{', '.join(names)}, = {source}", binds=names)
        self.code.add(f"{source}.clear()")

    def begin(self, source: str, nodes: Iterable[fx.Node]) -> None:
        """Bind the arguments."""
        nodes = list(nodes)
        self.unpack(source, [self.names[node] for node in nodes])
        self.defined.update(nodes)

    def act(self) -> None:
        """Do what is due at the boundary reached."""
        for act, value in self.acts.get(self._op, ()):
            self.code.add(f"contents.{act.name.lower()}({value})")

    def op(self, step: Step, first: Iterable[fx.Node] = ()) -> None:
        """Issue an op, what is due before it, and what it, or an op soon after it, needs."""
        self.act()
        self._op += 1
        self._demand_all((*first, *step.inputs))
        if self._writer.watched:
            self.code.add("watch.start()")
        self._call(step)
        if self._writer.watched:
            shown = [self.names[node] for node in step.made]
            # What it read is there until it has been watched, as it is while it runs.
            held = [*shown, *(self.names[node] for node in step.inputs)]
            self.code.add(f"watch.stop(({''.join(name + ', ' for name in shown)}))", held)

    def attempt(self, step: Step) -> None:
        """Have a cheaper way to the result of an op tried."""
        short = shortcut_of(self._writer.joint, step)
        if short is not None:
            (made,) = (self.names[node] for node in short.made)
            reads = [self.names[node] for node in short.inputs]
            call = self.code.call(short, self.names)
            self.code.add(f"watch.attempt(lambda: {call}, {made})", [*reads, made])

    def _demand_all(self, nodes: Sequence[fx.Node]) -> None:
        """Have nodes defined, what comes back for them first, in the order in which it was made.

        What replays hold for one another depends on their order, and that one is what is counted.
        """
        pending, behind = [*nodes], set[fx.Node]()
        while pending:
            node = pending.pop()
            if node not in self.defined and node not in behind:
                behind.add(node)
                pending += self._behind(node)
        order = self._writer.order
        for node in sorted(behind.intersection(self._recoverable), key=order.__getitem__):
            self.demand(node)
        for node in nodes:
            self.demand(node)

    def demand(self, node: fx.Node) -> str:
        """Have a node defined; what only shows bytes is made where it is first needed. Its name."""
        # By hand: what is made again can start from a row of hundreds that are.
        pending, opened = [node], set[fx.Node]()
        while pending:
            needed = pending[-1]
            behind = () if needed in self.defined else self._behind(needed)
            missing = [source for source in behind if source not in self.defined]
            if missing:
                if needed in opened:
                    raise PlanMismatchError(
                        f"{needed.name} is to be made again from itself: the plan is for another "
                        "graph, make a new one"
                    )
                opened.add(needed)
                pending += reversed(missing)
                continue
            pending.pop()
            if needed in self.defined:
                continue
            if needed in self._recoverable:
                self._writer.recover(self, needed)
            else:
                self._call(self._writer.made_by[needed])
        return self.names[node]

    def _behind(self, node: fx.Node) -> Iterable[fx.Node]:
        """What has to be defined before a node can be."""
        if node in self._recoverable:
            return self._writer.sources(node)
        return self._writer.made_by[node].inputs

    def result(self, node: Any) -> str:
        """Have something that is returned; its name."""
        return self.demand(node) if isinstance(node, fx.Node) else repr(node)

    def replay(self, replay: Replay) -> None:
        """Run ops of forward again, but for those that others have run at this boundary.

        What they make beside the targets is dropped once nothing at this boundary reads it.
        """
        if self._at != self._op:
            self._at, self._again = self._op, {}
        names = {node: self.names[node] for node in self._writer.joint.constants}
        names |= {node: self.names[node] for node in replay.sources}
        for step in replay.steps:
            if not replay.overwrites and self._again.keys() >= {*step.made}:
                names |= {node: self._again[node] for node in step.made}
                continue
            for node in step.made:
                target = node in replay.targets
                names[node] = self.names[node] if target else f"again{replay.storage}_{node.name}"
            self.code.step(step, names, scarce=self._op - 1 in self._scarce)
            if self._writer.watched:
                shown = [names[node] for node in step.made]
                self.code.add(f"watch.seen(({''.join(name + ', ' for name in shown)}))", shown)
        if not replay.overwrites:
            self._again |= {node: names[node] for step in replay.steps for node in step.made}
        self.names |= {node: names[node] for node in replay.targets}
        self.defined.update(replay.targets)

    def _call(self, step: Step) -> None:
        self.code.step(step, self.names, scarce=self._op - 1 in self._scarce)
        self.defined.update(step.made)
