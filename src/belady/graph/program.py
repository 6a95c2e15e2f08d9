"""Forward and backward of one graph as Python functions that carry out `Orders`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from belady.graph.body import Body
from belady.graph.code import Code, Does, Keeper
from belady.graph.joint import Joint
from belady.graph.layout import Layout
from belady.graph.orders import AS_SAVED, Orders
from belady.graph.placing import place
from belady.graph.replays import replays_of
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
    codes
        What forward and backward were compiled of; None for what was not.
    """

    forward: Callable[..., tuple[list[Any], list[Any], tuple[int, ...]]]
    backward: Callable[..., list[Any]]
    checked: tuple[int, ...]
    codes: tuple[Code, Code] | None = None

    def told(self, keeper: Keeper) -> Program:
        """The same program, of whose values ``keeper`` is told as it runs."""
        return self._of(lambda code: code.told(keeper))

    def with_constants(self, instead: Callable[[Any], Any]) -> Program:
        """The same program, with what ``instead`` gives for each constant, functions among them."""
        return self._of(lambda code: code.with_constants(instead))

    def _of(self, made: Callable[[Code], Code]) -> Program:
        assert self.codes is not None
        forward, backward = map(made, self.codes)
        return replace(
            self, forward=forward.function(_FORWARD), backward=backward.function(_BACKWARD)
        )


_FORWARD, _BACKWARD = "forward(args, contents, watch)", "backward(saved, args, contents, watch)"


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
    codes = writer.forward(), writer.backward()
    forward, backward = codes[0].function(_FORWARD), codes[1].function(_BACKWARD)
    return Program(forward, backward, writer.checked, codes)


class _Writer:
    """Writes both functions; the forward one says what the backward one finds."""

    def __init__(
        self, joint: Joint, layout: Layout, orders: Orders, watched: bool, fuse: Fuse | None
    ) -> None:
        self.joint, self.watched, self._fuse = joint, watched, fuse
        self._layout, self.orders = layout, orders
        self._replays = replays_of(joint, layout, orders.replayed)
        self.made_by = {n: step for step in (*joint.forward, *joint.backward) for n in step.made}
        given = (*joint.primals, *joint.tangents)
        self.order = {node: place for place, node in enumerate((*given, *self.made_by))}
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
        given_out = {it for it in joint.forward_outputs if isinstance(it, fx.Node)}
        given_out.difference_update(joint.primals)
        self._given_out = {layout.storage_of[it] for it in given_out if it in layout.storage_of}
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

    def forward(self) -> Code:
        body = Body(self, 0, set())
        body.begin("args", self.joint.primals)
        for node in self.joint.primals:
            self._hold(body, [node])
        for step in self.joint.forward:
            if self._layout.is_op(step):
                body.op(step)
                if self.watched:
                    body.attempt(step)
                self._hold(body, self._layout.settled(step, self._last_writes))
        body.act()
        outputs = [body.result(node) for node in self.joint.forward_outputs]
        for node in self._kept:
            body.demand(node)
        # Saved as itself, a result would hold the graph that holds what is saved. And who watches
        # counts the tensors on a storage to learn whether anybody else holds it.
        detached = self._outside if self.watched else self._given_out
        saved = [
            f"{body.names[node]}.detach()"
            if self._layout.storage_of.get(node) in detached
            else body.names[node]
            for node in self._kept
        ]
        saved += self._handles()
        versions = [f"{body.names[self._kept[place]]}._version" for place in self.checked]
        body.code.add(
            f"return [{', '.join(outputs)}], [{', '.join(saved)}], "
            f"({''.join(version + ', ' for version in versions)})",
            [*(name for name in outputs if name != "None")]
            + [body.names[node] for node in self._kept]
            + self._handles(),
        )
        return self._finished(body)

    def _finished(self, body: Body) -> Code:
        if self._fuse is not None:
            fused(body.code, self._layout, self._fuse)
        place(body.code, {body.names[node] for node in self.orders.apart})
        return body.code

    def _handles(self) -> list[str]:
        names = []
        for storage, nodes in self._held.items():
            names += [f"held{storage}", *(f"lay_{node.name}" for node in nodes)]
        return names

    def _hold(self, body: Body, nodes: Iterable[fx.Node]) -> None:
        """Begin to manage storages that have just come into being, or come in."""
        for storage in dict.fromkeys(self._layout.storage_of.get(node, -1) for node in nodes):
            if storage not in self._held or storage in body.begun:
                continue
            body.begun.add(storage)
            base = next(n for n in nodes if self._layout.storage_of.get(n) == storage)
            name, value = f"held{storage}", self.orders.held[storage]
            call = f"contents.hold({value}, {body.names[base]}, {storage in self._outside})"
            body.code.add(f"{name} = {call}", [body.names[base]], [name], does=Does.HOLDS)
            of = body.code.constant(Geometry.of, "geometry")
            for node in self._held[storage]:
                shown = body.demand(node)
                body.code.add(f"lay_{node.name} = {of}({shown})", [shown], [f"lay_{node.name}"])

    def backward(self) -> Code:
        body = Body(self, 1, self._recoverable())
        moved = {node for nodes in self._held.values() for node in nodes}
        first = self._fuse and read_in_run(self.joint.backward, self._layout, body.acts, moved)
        names = [*(body.names[node] for node in self._kept), *self._handles()]
        body.defined.update(self._kept)
        body.unpack("saved", names)
        body.begin("args", self.joint.tangents)
        ops = [step for step in self.joint.backward if self._layout.is_op(step)]
        for at, step in enumerate(ops):
            again = [it for due in self.orders.due.get(at, ()) for it in self._replays[due].targets]
            # What comes back does so before ops that may be one kernel, not between them.
            body.op(step, (*again, *(first[at] if first else ())))
        body.act()
        results = [body.result(node) for node in self.joint.backward_outputs]
        body.code.add(f"return [{', '.join(results)}]", [r for r in results if r != "None"])
        self._keep_handles(body)
        return self._finished(body)

    def _keep_handles(self, body: Body) -> None:
        """Hold each copy in its tier until the last use of the value, as the plan counts it."""
        lines = body.code.lines
        last = {name: place for place, line in enumerate(lines) for name in line.reads}
        using: dict[int, int] = {}
        for node, storage in self._layout.storage_of.items():
            at = last.get(body.names[node], -1) if storage in self._held else -1
            using[storage] = max(at, using.get(storage, -1))
        for storage in self._held:
            if using[storage] >= 0:
                line = lines[using[storage]]
                lines[using[storage]] = replace(line, reads=(*line.reads, f"held{storage}"))

    def _recoverable(self) -> set[fx.Node]:
        targets = {node for replay in self._replays.values() for node in replay.targets}
        return targets.union(*self._held.values())

    def sources(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """What a node of forward is made again from in backward, if it is."""
        replay = self._replays.get(self._layout.storage_of[node])
        return () if replay is None else replay.sources

    def recover(self, body: Body, node: fx.Node) -> None:
        """Have a node of forward in backward: laid out on bytes brought back, or made again."""
        storage = self._layout.storage_of[node]
        if storage in self._replays:
            body.replay(self._replays[storage])
            return
        name = f"bytes{storage}"
        body.code.add(f"{name} = held{storage}.take()", [f"held{storage}"], [name])
        for shown in self._held[storage]:
            it, lay = body.names[shown], f"lay_{shown.name}"
            body.code.add(f"{it} = {lay}.on({name})", [lay, name], [it])
            body.defined.add(shown)
