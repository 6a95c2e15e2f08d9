"""A trace in the making: storages and contents while they are drawn, and what crosses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from belady.graph.doors import fake_value
from belady.graph.parts import Part
from belady.ir.trace import PERSISTENT, Op, Save, Storage, StorageKind, Tier, Use


@dataclass
class Bytes:
    """A storage while it is drawn.

    Attributes
    ----------
    end
        Boundary after its last use, saves aside.
    open
        Whether somebody outside the graphs holds it until nobody knows when.
    """

    nbytes: int
    kind: StorageKind
    birth: int
    end: int
    open: bool = False
    saved_until: int = 0

    def use(self, boundary: int) -> None:
        """It is held until ``boundary`` at least."""
        self.end = max(self.end, boundary)

    def closed(self, device: str, end: int) -> Storage:
        """What it came to, in an iteration of ``end`` ops."""
        released = end if self.open else self.end
        # Autograd may hold it for longer than anybody else.
        death = max(released, self.saved_until)
        home = Tier.DEVICE if self.kind in PERSISTENT else None
        return Storage(device, self.nbytes, self.kind, self.birth, released, death, home)


@dataclass
class Content:
    """A value while it is drawn."""

    storage: int
    version: int
    producer: int
    uses: list[Use] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


@dataclass
class Call:
    """One call of a graph while its parts are drawn.

    Attributes
    ----------
    turned
        First op of its backward; None before there is one.
    """

    part: Part
    start: int
    storages: dict[int, int] = field(default_factory=dict)
    values: dict[int, int] = field(default_factory=dict)
    made_at: dict[int, int] = field(default_factory=dict)
    by_sequence: dict[int, int] = field(default_factory=dict)
    turned: int | None = None

    def holds(self, storage: int, value: int, made: int) -> None:
        """From boundary ``made`` on a storage holds ``value``."""
        self.values[storage], self.made_at[storage] = value, made


class Crossing(NamedTuple):
    """A node of forward that backward reads: where it lies, when it is read and let go.

    Without ``read_by_op`` backward only hands it on.
    """

    node: fx.Node
    ordinal: int
    storage: int
    reads: tuple[int, ...]
    dropped: int
    read_by_op: bool


def crossings(part: Part, start: int, end: int) -> Iterator[Crossing]:
    """What crosses into a backward whose ops are ``start`` to ``end`` and has bytes to decide over.

    Numbers, and tensors on another device, have none.
    """
    readers = _readers(part, start)
    handed_on = set(nodes_in(part.joint.backward_outputs))
    for ordinal, node in enumerate(part.joint.crossing):
        storage = part.layout.storage_of.get(node)
        if storage is None or not part.layout.sizes[storage]:
            continue
        reads = readers.get(node, [])
        dropped = reads[-1] + 1 if reads else start
        read_by_op = bool(reads)
        if node in handed_on:
            reads, dropped = [*reads, end], end
        yield Crossing(node, ordinal, storage, tuple(reads), dropped, read_by_op)


def save_of(call: Call, crossing: Crossing, value: int, made: int, ops: Sequence[Op]) -> Save:
    """How a trace tells of a crossing that saves ``value``, which op ``made`` made."""
    reads = crossing.reads
    reader = ops[reads[0]].forward_op if crossing.read_by_op else None
    op = made if reader is None else reader
    tensor = fake_value(crossing.node)
    return Save(
        pass_index=call.part.call,
        ordinal=crossing.ordinal,
        op=op,
        packed=call.made_at[crossing.storage],
        reads=reads,
        dropped=crossing.dropped,
        as_input=value in ops[op].reads,
        module=ops[op].module,
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        offset=int(tensor.storage_offset()),
        dtype=str(tensor.dtype).removeprefix("torch."),
    )


def nodes_in(results: Sequence[object]) -> list[fx.Node]:
    """The nodes among the results of a graph."""
    return [it for it in results if isinstance(it, fx.Node)]


def _readers(part: Part, start: int) -> dict[fx.Node, list[int]]:
    """Backward ops that read each crossing node, also by looking at its bytes otherwise."""
    roots = {node: {node} for node in part.joint.crossing}
    found: dict[fx.Node, list[int]] = {}
    index = start
    for step in part.joint.backward:
        sources = {root for node in step.inputs for root in roots.get(node, ())}
        if not part.layout.is_op(step):
            roots |= dict.fromkeys(step.made, sources)
            continue
        for root in sources:
            found.setdefault(root, []).append(index)
        index += 1
    return found
