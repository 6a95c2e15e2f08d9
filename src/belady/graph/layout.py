"""Which nodes of a joint graph share bytes, and what each step makes and writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from belady.graph.doors import fake_value
from belady.graph.joint import Joint, Step
from belady.ir.trace import Need
from belady.measure.records import mutated, need_of, written_arguments


@dataclass
class Layout:
    """The storages of one joint graph, numbered in the order in which they appear.

    Attributes
    ----------
    storage_of
        Storage that a node's tensor lies on; nodes without a tensor are absent.
    sizes
        Bytes of each storage; 0 on another device, since those neither count nor move.
    """

    storage_of: dict[fx.Node, int] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    _works: dict[fx.Node, bool] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, joint: Joint, device: torch.device) -> Layout:
        """Read it off the tensors without bytes with which the graph was traced."""
        layout = cls()
        known: dict[int, int] = {}
        for node in _tensors(joint):
            value = fake_value(node)
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                index = known.setdefault(storage._cdata, len(layout.sizes))
                if index == len(layout.sizes):
                    here = value.device == device
                    layout.sizes.append(int(storage.nbytes()) if here else 0)
                layout.storage_of[node] = index
        return layout

    def reads(self, step: Step) -> list[int]:
        """Storages that a step reads, each once."""
        found = (self.storage_of[node] for node in step.inputs if node in self.storage_of)
        return list(dict.fromkeys(found))

    def need(self, step: Step, storage: int) -> Need:
        """What a step reads of a storage: less than its values only where a backward may."""
        name, args = str(step.node.target), step.node.args
        operands = [
            it for it in tree_leaves(args) if isinstance(it, fx.Node) and it in self.storage_of
        ]
        needs = {
            need_of(name, args, position)
            for position, node in enumerate(operands)
            if self.storage_of[node] == storage
        }
        return needs.pop() if len(needs) == 1 else Need.VALUES

    def makes(self, step: Step) -> list[int]:
        """Storages that come into being in a step, each once."""
        inputs = set(self.reads(step))
        found = (self.storage_of[node] for node in step.made if node in self.storage_of)
        return [storage for storage in dict.fromkeys(found) if storage not in inputs]

    def writes_to(self, step: Step) -> list[int]:
        """Storages of its inputs that a step overwrites."""
        node = step.node
        targets = tree_leaves(mutated(written_arguments(node.target), node.args, node.kwargs))
        return [self.storage_of[it] for it in targets if it in self.storage_of]

    def settled(self, step: Step, last_writes: Mapping[int, Step]) -> list[fx.Node]:
        """Results of a step whose bytes no later one writes to; ``last_writes`` are by storage."""
        places = ((node, self.storage_of.get(node, -1)) for node in step.made)
        return [node for node, storage in places if last_writes.get(storage, step) is step]

    def is_here(self, node: fx.Node) -> bool:
        """Whether a node's tensor lies on the device."""
        storage = self.storage_of.get(node)
        return storage is None or self.sizes[storage] > 0

    def is_op(self, step: Step) -> bool:
        """Whether a step does work; one that only shows bytes otherwise does not."""
        known = self._works.get(step.node)
        if known is None:
            shown = any(node in self.storage_of for node in step.made)
            known = not shown or bool(self.makes(step) or self.writes_to(step))
            self._works[step.node] = known
        return known


def _tensors(joint: Joint) -> Iterator[fx.Node]:
    yield from joint.primals
    yield from joint.tangents
    for step in (*joint.forward, *joint.backward):
        yield from step.made
