"""A graph that Dynamo captured, and what is known of it: whoever makes it run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from belady.graph.joint import Joint
from belady.graph.layout import Layout
from belady.graph.program import Program, program_of


@dataclass(frozen=True)
class Named:
    """The names in a graph when it was called first, by the modules that it was captured of.

    Attributes
    ----------
    steps
        Path of the module that runs a step, by its node.
    inputs
        Paths of the parameters and buffers among its inputs, by position.
    """

    steps: Mapping[fx.Node, str]
    inputs: tuple[str | None, ...]


class Captured:
    """One graph that Dynamo captured.

    Attributes
    ----------
    joint, layout
        Of a graph that is differentiated and that this engine can carry out.
    name, named
        What reports call it: the root of which it is a part; and its modules, since its first call.
    cast
        Numbers of the inputs that autocast casts, and remembers.
    summed
        Numbers of the gradients that it sums itself.
    reached
        For each gradient, the numbers of the results that lead to it; empty where not known.

    Parameters
    ----------
    sliced
        Whether modules in it run in slices.
    """

    def __init__(self, device: torch.device, *, sliced: bool = False) -> None:
        self.sliced = sliced
        self.name = ""
        self.named: Named | None = None
        self.joint: Joint | None = None
        self.layout = Layout()
        self.cast: tuple[int, ...] = ()
        self.summed: tuple[int, ...] = ()
        self.reached: tuple[frozenset[int], ...] = ()
        self._device = device

    @cached_property
    def as_saved(self) -> Program:
        """The program that saves what plain PyTorch saves."""
        if self.joint is None:
            raise RuntimeError("this graph was not cut by the graph engine")
        return program_of(self.joint, self.layout)

    def put(self, joint: Joint) -> None:
        """Go on with another joint graph, with the same inputs and results."""
        self.joint, self.layout = joint, Layout.of(joint, self._device)
        self.__dict__.pop("as_saved", None)
