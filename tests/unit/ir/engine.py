"""The eager engine on paper: who holds which bytes, boundary by boundary.

It follows `belady.eager.planned` event by event and knows nothing of intervals.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from belady.ir.plan import Managed, Offload, Plan, Recompute
from belady.ir.residency import offload_boundaries
from belady.ir.trace import Save, Tier, Trace


@dataclass
class Content:
    """Bytes of one value, as `belady.memory.contents.Moved` or `belady.eager.replay` holds them."""

    unread: int
    replay: bool = False
    handles: list[Save] = field(default_factory=list)
    source: bool = True
    parcel: bool = False
    here: bool = False
    handed: list[Save] = field(default_factory=list)
    brought: bool = False
    managed: Managed | None = None

    def bring(self) -> None:
        if (self.parcel or self.replay) and not self.source and not self.here:
            self.here = self.brought = True

    def read(self, save: Save) -> None:
        if not self.source:
            self.bring()
            # Autograd holds what it was handed until its op is over.
            self.handed.append(save)
        self.unread -= 1
        if self.unread == 0 and self.managed is None:
            self.here = False

    def drop(self, save: Save) -> None:
        self.handles.remove(save)
        self.handed = [other for other in self.handed if other is not save]


class Engine:
    """Runs a trace under a plan of moves and replays; ``held`` and ``off`` are filled op by op.

    Attributes
    ----------
    held
        Bytes by tier during each op.
    off
        Values whose bytes are away during each op and have not been brought back yet.
    blocks
        Most bytes of managed blocks that were on the device; ``held`` is without them.
    """

    def __init__(self, trace: Trace, plan: Plan) -> None:
        self.trace = trace
        self.moves = {v: d for v, d in plan.decisions.items() if isinstance(d, Offload)}
        self.paged = {v: d for v, d in plan.decisions.items() if isinstance(d, Managed)}
        self.moves |= {value: decision.moves for value, decision in self.paged.items()}
        self.blocks = 0
        self.again = {v: d for v, d in plan.decisions.items() if isinstance(d, Recompute)}
        self.contents: dict[int, Content] = {}
        self.kept: list[tuple[int, Save]] = []
        self.due = sorted(
            (boundary, step, value)
            for value, move in self.moves.items()
            for step, boundary in enumerate(offload_boundaries(trace, move))
        )
        self.due = sorted([*self.due, *((it.at, 2, value) for value, it in self.again.items())])
        self.held: list[Counter[Tier]] = []
        self.off: list[set[int]] = []

    def run(self) -> Engine:
        for boundary in range(len(self.trace.ops)):
            self._drops(boundary)
            if self._saves(boundary) | self._first_reads(boundary) or not self.trace.anchors:
                self._advance(boundary)
            self._reads(boundary)
            self._count_blocks()
            self._count(boundary)
        return self

    def _drops(self, boundary: int) -> None:
        self.kept = [(v, save) for v, save in self.kept if save.dropped > boundary]
        for value, content in list(self.contents.items()):
            for save in [save for save in content.handles if save.dropped <= boundary]:
                content.drop(save)
            if not content.handles:
                del self.contents[value]

    def _saves(self, boundary: int) -> bool:
        found = False
        for index, value in enumerate(self.trace.values):
            for save in value.saves:
                if save.packed == boundary:
                    found = True
                    if save.dropped > boundary:
                        self._save(index, save)
        return found

    def _save(self, index: int, save: Save) -> None:
        if index not in self.moves and index not in self.again:
            self.kept.append((index, save))
            return
        if index not in self.contents:
            total = sum(len(other.reads) for other in self.trace.values[index].saves)
            replay = index in self.again
            content = Content(total, replay, source=not replay, managed=self.paged.get(index))
            self.contents[index] = content
        self.contents[index].handles.append(save)

    def _first_reads(self, boundary: int) -> bool:
        saves = (save for value in self.trace.values for save in value.saves)
        return any(save.reads[:1] == (boundary,) for save in saves)

    def _advance(self, boundary: int) -> None:
        while self.due and self.due[0][0] <= boundary:
            _, step, value = self.due.pop(0)
            content = self.contents.get(value)
            if content is None:
                continue
            if step == 0:
                content.parcel = True
                if content.managed is not None:
                    content.source, content.here = False, True
                    self._count_blocks()
                    if content.managed.gone_by == content.managed.prefetch_out_at:
                        content.here = False
            elif step == 1:
                content.source = content.source and not content.parcel
                content.here = content.here and not (content.managed and content.parcel)
            else:
                content.bring()
            self._count_blocks()

    def _count_blocks(self) -> None:
        here = (v for v, c in self.contents.items() if c.managed and c.here)
        values, storages = self.trace.values, self.trace.storages
        self.blocks = max(self.blocks, sum(storages[values[v].storage].nbytes for v in here))

    def _reads(self, boundary: int) -> None:
        for content in self.contents.values():
            for save in content.handles:
                for _ in range(save.reads.count(boundary)):
                    content.read(save)

    def _count(self, boundary: int) -> None:
        held: Counter[Tier] = Counter()
        off: set[int] = set()
        keepers = {self.trace.values[value].storage for value, _ in self.kept}
        keepers |= {self.trace.values[v].storage for v, c in self.contents.items() if c.source}
        for index, storage in enumerate(self.trace.storages):
            if storage.birth <= boundary and (boundary < storage.released or index in keepers):
                held[Tier.DEVICE] += storage.nbytes
        for value, content in self.contents.items():
            index = self.trace.values[value].storage
            nbytes = self.trace.storages[index].nbytes
            if content.managed is None:
                held[Tier.DEVICE] += nbytes * (content.here or bool(content.handed))
            if content.parcel:
                held[self.moves[value].tier] += nbytes
            original = content.source or boundary < self.trace.storages[index].released
            if (content.parcel or content.replay) and not original and not content.brought:
                off.add(value)
        self.held.append(held)
        self.off.append(off)
