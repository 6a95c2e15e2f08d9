"""Forward and backward of one graph as Python functions that carry out `Orders`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from belady.graph.code import Code, NodeNames
from belady.graph.joint import Joint, Step
from belady.graph.layout import Layout
from belady.graph.orders import AS_SAVED, Orders
from belady.graph.placing import place
from belady.graph.replays import Replay, replays_of, shortcut_of
from belady.graph.seams import read_in_run
from belady.graph.segments import Fuse, fused
from belady.memory.geometry import Geometry


@dataclass(frozen=True, slots=True)
class Program:
    """Runnable parts of a joint graph.

    Attributes
    ----------
    forward
        ``(args, contents, watch)`` to results, what backward needs, and the versions of what others
        may write to. It empties ``args``.
    backward
        ``(saved, args, contents, watch)`` to gradients. It empties ``saved`` and ``args``, so that
        every value goes as soon as it is consumed.
    checked
        Places in what backward needs of the tensors whose versions forward gives.
    """

    forward: Callable[..., tuple[list[Any], list[Any], tuple[int, ...]]]
    backward: Callable[..., list[Any]]
    checked: tuple[int, ...]


def program_of(
    joint: Joint,
    layout: Layout,
    orders: Orders = AS_SAVED,
    *,
    watched: bool = False,
    fuse: Fuse | None = None,
) -> Program:
    """Generate the code of a joint graph; ``fuse`` makes one call of ops between movements.

    What crosses from forward to backward is what backward reads of forward, as autograd saves it,
    less what ``orders`` make again, and with what making it again starts from.
    """
    writer = _Writer(joint, layout, orders, watched, fuse)
    return Program(writer.forward(), writer.backward(), writer.checked)


class _Writer:
    """Writes both functions; the forward one says what the backward one finds."""

    def __init__(
        self, joint: Joint, layout: Layout, orders: Orders, watched: bool, fuse: Fuse | None
    ) -> None:
        self.joint, self.watched, self._fuse = joint, watched, fuse
        self._layout, self._orders = layout, orders
        self._replays = replays_of(joint, layout, orders.replayed)
        self.made_by = {n: step for step in (*joint.forward, *joint.backward) for n in step.made}
        self._last_writes = {it: step for step in joint.forward for it in layout.writes_to(step)}
        self._kept: list[fx.Node] = []
        self._held: dict[int, list[fx.Node]] = {storage: [] for storage in orders.held}
        for node in self._crossing():
            storage = layout.storage_of.get(node, -1)
            if storage in self._held:
                self._held[storage].append(node)
            else:
                self._kept.append(node)
        self._held = {storage: nodes for storage, nodes in self._held.items() if nodes}
        outside = [it for it in (*joint.primals, *joint.forward_outputs) if isinstance(it, fx.Node)]
        self._outside = {layout.storage_of.get(node, -1) for node in outside}
        self._given_out = {
            layout.storage_of[node]
            for node in joint.forward_outputs
            if isinstance(node, fx.Node) and node in layout.storage_of and node not in joint.primals
        }
        self.checked = tuple(
            place
            for place, node in enumerate(self._kept)
            if layout.storage_of.get(node, -2) in self._outside
        )

    def _crossing(self) -> Iterable[fx.Node]:
        """Nodes of forward that backward starts from."""
        sources = (node for replay in self._replays.values() for node in replay.sources)
        return dict.fromkeys(
            node
            for node in (*self.joint.crossing, *sources)
            if self._layout.storage_of.get(node, -1) not in self._replays
        )

    def forward(self) -> Callable[..., Any]:
        part = _Part(self, 0, set())
        part.begin("args", self.joint.primals)
        for node in self.joint.primals:
            self._hold(part, [node])
        for step in self.joint.forward:
            if self._layout.is_op(step):
                part.op(step)
                if self.watched:
                    part.attempt(step)
                self._hold(part, self._layout.settled(step, self._last_writes))
        part.act()
        outputs = [part.result(node) for node in self.joint.forward_outputs]
        for node in self._kept:
            part.demand(node)
        # Saved as itself, a result would hold the graph that holds what is saved. And who watches
        # counts the tensors on a storage to learn whether anybody else holds it.
        detached = self._outside if self.watched else self._given_out
        saved = [
            f"{part.names[node]}.detach()"
            if self._layout.storage_of.get(node) in detached
            else part.names[node]
            for node in self._kept
        ]
        saved += self._handles()
        versions = [f"{part.names[self._kept[place]]}._version" for place in self.checked]
        part.code.add(
            f"return [{', '.join(outputs)}], [{', '.join(saved)}], "
            f"({''.join(version + ', ' for version in versions)})",
            [*(name for name in outputs if name != "None")]
            + [part.names[node] for node in self._kept]
            + self._handles(),
        )
        return self._function(part, "forward(args, contents, watch)")

    def _function(self, part: _Part, head: str) -> Callable[..., Any]:
        if self._fuse is not None:
            fused(part.code, self._layout, self._fuse)
        place(part.code, {part.names[node] for node in self._orders.apart})
        return part.code.function(head)

    def _handles(self) -> list[str]:
        names = []
        for storage, nodes in self._held.items():
            names += [f"held{storage}", *(f"lay_{node.name}" for node in nodes)]
        return names

    def _hold(self, part: _Part, nodes: Iterable[fx.Node]) -> None:
        """Begin to manage storages that have just come into being, or come in."""
        for storage in dict.fromkeys(self._layout.storage_of.get(node, -1) for node in nodes):
            if storage not in self._held or storage in part.begun:
                continue
            part.begun.add(storage)
            base = next(n for n in nodes if self._layout.storage_of.get(n) == storage)
            name, value = f"held{storage}", self._orders.held[storage]
            call = f"contents.hold({value}, {part.names[base]}, {storage in self._outside})"
            part.code.add(f"{name} = {call}", [part.names[base]], [name])
            of = part.code.constant(Geometry.of, "geometry")
            for node in self._held[storage]:
                shown = part.demand(node)
                part.code.add(f"lay_{node.name} = {of}({shown})", [shown], [f"lay_{node.name}"])

    def backward(self) -> Callable[..., Any]:
        part = _Part(self, 1, self._recoverable())
        moved = {node for nodes in self._held.values() for node in nodes}
        first = self._fuse and read_in_run(self.joint.backward, self._layout, part.acts, moved)
        names = [*(part.names[node] for node in self._kept), *self._handles()]
        part.defined.update(self._kept)
        part.unpack("saved", names)
        part.begin("args", self.joint.tangents)
        ops = [step for step in self.joint.backward if self._layout.is_op(step)]
        for at, step in enumerate(ops):
            # What comes back does so before ops that may be one kernel, not between them.
            part.op(step, first[at] if first else ())
        part.act()
        results = [part.result(node) for node in self.joint.backward_outputs]
        part.code.add(f"return [{', '.join(results)}]", [r for r in results if r != "None"])
        self._keep_handles(part)
        return self._function(part, "backward(saved, args, contents, watch)")

    def _keep_handles(self, part: _Part) -> None:
        """Hold each copy in its tier until the last use of the value, as the plan counts it."""
        for storage in self._held:
            names = {part.names[n] for n, s in self._layout.storage_of.items() if s == storage}
            lines = part.code.lines
            using = [i for i, line in enumerate(lines) if names & set(line.reads)]
            if using:
                last = lines[using[-1]]
                lines[using[-1]] = replace(last, reads=(*last.reads, f"held{storage}"))

    def _recoverable(self) -> set[fx.Node]:
        targets = {node for replay in self._replays.values() for node in replay.targets}
        return targets.union(*self._held.values())

    def recover(self, part: _Part, node: fx.Node) -> None:
        """Have a node of forward in backward: laid out on bytes brought back, or made again."""
        storage = self._layout.storage_of[node]
        if storage in self._replays:
            part.replay(self._replays[storage])
            return
        name = f"bytes{storage}"
        part.code.add(f"{name} = held{storage}.take()", [f"held{storage}"], [name])
        for shown in self._held[storage]:
            it, lay = part.names[shown], f"lay_{shown.name}"
            part.code.add(f"{it} = {lay}.on({name})", [lay, name], [it])
            part.defined.add(shown)


class _Part:
    """One of the two functions in the making."""

    def __init__(self, writer: _Writer, which: int, recoverable: set[fx.Node]) -> None:
        orders = writer._orders
        self.code = Code()
        self.names = NodeNames(writer.joint, self.code)
        self.defined: set[fx.Node] = set(writer.joint.constants)
        self.begun: set[int] = set()
        self._writer = writer
        self.acts = (orders.forward, orders.backward)[which]
        self._scarce = orders.scarce[which]
        self._recoverable = recoverable
        self._op = 0

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
        for node in (*first, *step.inputs):
            self.demand(node)
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

    def demand(self, node: fx.Node) -> str:
        """Have a node defined; what only shows bytes is made where it is first needed. Its name."""
        if node in self.defined:
            return self.names[node]
        if node in self._recoverable:
            self._writer.recover(self, node)
        else:
            step = self._writer.made_by[node]
            for source in step.inputs:
                self.demand(source)
            self._call(step)
        return self.names[node]

    def result(self, node: Any) -> str:
        """Have something that is returned; its name."""
        return self.demand(node) if isinstance(node, fx.Node) else repr(node)

    def replay(self, replay: Replay) -> None:
        """Run ops of forward again; what they make beside the targets is dropped."""
        names = {node: self.names[node] for node in self._writer.joint.constants}
        names |= {node: self.demand(node) for node in replay.sources}
        for step in replay.steps:
            for node in step.made:
                target = node in replay.targets
                names[node] = self.names[node] if target else f"again{replay.storage}_{node.name}"
            self.code.step(step, names, scarce=self._op - 1 in self._scarce)
            if self._writer.watched:
                shown = [names[node] for node in step.made]
                self.code.add(f"watch.seen(({''.join(name + ', ' for name in shown)}))", shown)
        self.defined.update(replay.targets)

    def _call(self, step: Step) -> None:
        self.code.step(step, self.names, scarce=self._op - 1 in self._scarce)
        self.defined.update(step.made)
