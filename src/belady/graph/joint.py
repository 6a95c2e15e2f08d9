"""The joint forward and backward graph of one captured graph, as steps in issue order."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from belady.errors import TraceError
from belady.graph.doors import fake_value, is_forward


@dataclass(frozen=True, slots=True)
class Step:
    """One call of the graph.

    Attributes
    ----------
    outputs
        The nodes that stand for its results, in order: itself, or what takes a tuple apart. None
        for a result that nobody uses.
    several
        Whether it gives a tuple.
    """

    node: fx.Node
    outputs: tuple[fx.Node | None, ...]
    several: bool

    @property
    def inputs(self) -> list[fx.Node]:
        """The nodes that it reads, each once."""
        return self.node.all_input_nodes

    @property
    def made(self) -> list[fx.Node]:
        """The nodes that stand for its results, without gaps."""
        return [node for node in self.outputs if node is not None]


@dataclass(frozen=True)
class Joint:
    """A joint graph in parts.

    Attributes
    ----------
    primals, tangents
        Inputs of forward, and the gradients that backward is given.
    forward, backward
        Steps in the order in which they were traced, which is that of plain PyTorch.
    forward_outputs, backward_outputs
        Nodes, or what else forward and backward return (None for no gradient).
    constants
        Tensors that are part of the graph itself.
    """

    primals: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    forward_outputs: tuple[Any, ...]
    backward_outputs: tuple[Any, ...]
    constants: Mapping[fx.Node, Any]

    @classmethod
    def of(cls, module: fx.GraphModule, outputs: int) -> Joint:
        """Take a joint graph apart, the first ``outputs`` results of which are those of forward.

        Raises
        ------
        TraceError
            If it has what this engine does not carry out.
        """
        graph = module.graph
        constants = _constants(module)
        placeholders = graph.find_nodes(op="placeholder")
        results = tree_leaves(
            graph.find_nodes(op="output")[0].args, is_leaf=lambda leaf: leaf is None
        )
        tangents = tuple(node for node in placeholders if "tangents" in str(node.target))
        made_by = dict.fromkeys(tangents, True)
        forward: list[Step] = []
        backward: list[Step] = []
        for step in _steps(graph):
            # What needs a gradient cannot run in forward, whatever it is tagged.
            late = not is_forward(step.node) or any(made_by.get(node) for node in step.inputs)
            made_by |= dict.fromkeys(step.made, late)
            (backward if late else forward).append(step)
        primals = tuple(node for node in placeholders if node not in tangents)
        joint = cls(
            primals,
            tangents,
            tuple(forward),
            tuple(backward),
            tuple(results[:outputs]),
            tuple(results[outputs:]),
            constants,
        )
        if any(made_by.get(node) for node in joint.forward_outputs if isinstance(node, fx.Node)):
            raise TraceError("a result of forward is computed in backward")
        return joint

    @cached_property
    def crossing(self) -> tuple[fx.Node, ...]:
        """What backward reads of forward, in the order in which forward makes it.

        Of one step the first result comes last, since it may be made again from the others: a norm
        from the statistics that it gives beside.
        """
        made = [*self.primals, *(node for step in self.forward for node in reversed(step.made))]
        read = {node for step in self.backward for node in step.inputs}
        read.update(node for node in self.backward_outputs if isinstance(node, fx.Node))
        return tuple(node for node in made if node in read)


def whole_graph(module: fx.GraphModule) -> Joint:
    """A graph that nobody differentiates, as one that has no backward.

    Raises
    ------
    TraceError
        As `Joint.of`.
    """
    graph = module.graph
    constants = _constants(module)
    results = tree_leaves(graph.find_nodes(op="output")[0].args, is_leaf=lambda leaf: leaf is None)
    primals = tuple(graph.find_nodes(op="placeholder"))
    return Joint(primals, (), tuple(_steps(graph)), (), tuple(results), (), constants)


def _steps(graph: fx.Graph) -> Iterator[Step]:
    for node in graph.nodes:
        if node.op != "call_function" or _takes_apart(node):
            continue
        value = fake_value(node)
        if isinstance(value, (tuple, list)):
            outputs: list[fx.Node | None] = [None] * len(value)
            for user in node.users:
                if not _takes_apart(user) or outputs[user.args[1]] is not None:
                    raise TraceError(f"{node.target} gives a tuple that is used as a whole")
                outputs[user.args[1]] = user
            yield Step(node, tuple(outputs), several=True)
        else:
            yield Step(node, (node,), several=False)


def _takes_apart(node: fx.Node) -> bool:
    """Whether the node takes one result out of a call that gives several."""
    if node.target is not operator.getitem:
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and isinstance(fake_value(source), (tuple, list))


def _constants(module: fx.GraphModule) -> dict[fx.Node, Any]:
    """Check that the graph is of the kind that can be carried out; its constants."""
    found: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            found[node] = operator.attrgetter(str(node.target))(module)
        if node.op not in ("placeholder", "call_function", "get_attr", "output") or isinstance(
            found.get(node), fx.GraphModule
        ):
            raise TraceError(f"the captured graph holds {node.op} {node.target!r}")
        if node.op == "placeholder" and "rng_state" in str(node.target):
            raise TraceError("the captured graph takes the state of a random generator")
        for value in tree_leaves(fake_value(node)):
            _refuse_value(node, value)
    return found


def _refuse_value(node: fx.Node, value: Any) -> None:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise TraceError(f"{node.target} depends on a size that is not fixed")
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise TraceError(f"{node.target} gives a tensor of layout {value.layout}")
        sizes: Sequence[Any] = (*value.shape, *value.stride(), value.storage_offset())
        if not all(isinstance(size, int) for size in sizes):
            raise TraceError(f"{node.target} gives a tensor whose size is not fixed")
