"""Gradients of captured graphs, and optimizer state, out of what activations are cut from.

Autograd has the gradients of a graph when all of its backward is over. Until then each lies between
two activations, and the memory around it is in pieces (`belady.memory.lasting`). So what the plan
is carried out with copies a gradient as soon as it is made.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from typing import Any

import torch
from torch import fx

from belady.graph.code import Code, Line
from belady.graph.contents import Place
from belady.graph.crossing import nodes_in
from belady.graph.optimizers import Following, Ours
from belady.graph.parts import Part
from belady.ir.hardware import Allocator
from belady.ir.plan import Plan
from belady.ir.trace import StorageKind, Trace
from belady.memory.apart import Apart
from belady.memory.lasting import LARGE_BYTES, owns_its_bytes, settle_state
from belady.simulate.blocks import gradient_bytes, in_blocks


class Places:
    """Memory apart for gradients, and for the state of optimizers of some models.

    Parameters
    ----------
    modules
        The models; the list may grow.
    """

    def __init__(self, device: torch.device, modules: Sequence[torch.nn.Module]) -> None:
        self._ours: Collection[torch.optim.Optimizer] | Ours = Ours(modules)
        self._gradients, self._state = Apart(device), Apart(device)
        self._apart: set[Hashable] = set()
        self._set_aside = 0
        self._settled: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        # Elsewhere nothing is set apart.
        ended = "stepped" if device.type == "cuda" else None
        self._following = Following(self, ended=ended)

    def under(self, of: Hashable, trace: Trace, plan: Plan, allocator: Allocator) -> Place | None:
        """What gives gradients their place under a plan; None where they stay among the rest.

        Parameters
        ----------
        of
            The kind of iteration that the plan is for.
        """
        # A CPU has no blocks of torch's, and nothing is set apart there.
        if trace.device == "cuda" and in_blocks(trace, plan, allocator).gradients_apart:
            self._apart.add(of)
            self._set_aside = gradient_bytes(trace, plan, LARGE_BYTES)
            self.again()
            return self._gradient
        self._apart.discard(of)
        if not self._apart:
            self._gradients.close()
        return None

    def rest(self) -> None:
        """Give back what is set aside for gradients: they are placed elsewhere until `again`."""
        self._gradients.close()

    def again(self) -> None:
        """Set memory aside for gradients, where they have their own."""
        if self._apart:
            self._gradients.hold(self._set_aside)

    def stepped(self, optimizer: torch.optim.Optimizer, *_: Any, **_named: Any) -> None:
        """Move the state of an optimizer of these models when it has just come into being."""
        # A step that found no gradients has made none.
        if optimizer in self._settled or not optimizer.state or optimizer not in self._ours:
            return
        self._settled.add(optimizer)
        settle_state(optimizer, self._state.copy)

    def close(self) -> None:
        """Leave everything where it is from now on."""
        self._gradients.close()
        self._state.close()
        self._following.close()
        self._apart.clear()
        self._ours = ()

    def _gradient(self, made: torch.Tensor) -> torch.Tensor:
        # A backward can come after the end.
        placed = self._gradients.copy(made) if self._apart and owns_its_bytes(made) else None
        return made if placed is None else placed


def gradients_of(forward: Part) -> list[fx.Node]:
    """What ops of a graph's backward make that goes out as the large gradient of a parameter.

    Nothing that is written to after it was made, or on which something else that goes out lies.
    """
    joint, layout = forward.joint, forward.layout
    given = Counter(layout.storage_of.get(node, -1) for node in nodes_in(joint.backward_outputs))
    written = {it for step in joint.backward for it in layout.writes_to(step)}
    wanted = {
        layout.storage_of.get(node, -1)
        for node, name in zip(joint.backward_outputs, forward.inputs, strict=False)
        if isinstance(node, fx.Node)
        and name is not None
        and forward.kinds.get(name) is StorageKind.PARAMETER
    }
    return [
        node
        for step in joint.backward
        for node in step.made
        if (storage := layout.storage_of.get(node, -1)) in wanted.intersection(layout.makes(step))
        and given[storage] == 1
        and storage not in written
        and layout.sizes[storage] > LARGE_BYTES
    ]


def place(code: Code, gradients: Collection[str]) -> None:
    """Have ``code`` give gradients, by their names in it, their place when they have been made."""
    lines: list[Line] = []
    for line in code.lines:
        lines.append(line)
        lines += [
            Line(f"{name} = contents.place({name})", (name,), (name,))
            for name in line.binds
            if name in gradients
        ]
    code.lines[:] = lines
