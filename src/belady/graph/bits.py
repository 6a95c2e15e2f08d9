"""Where gradients of captured graphs can have other bits than plain PyTorch's.

*Sums.* Plain PyTorch adds the gradients of a tensor as they come: ``((a + b) + c) + d``.
A graph that uses the tensor twice hands out one gradient for both: ``(a + b) + (c + d)``. Bits can
differ where others add to such a sum in the same backward. They cannot where all gradients come
from one call of one graph, or where there are two in all.

*Casts.* Under autocast plain PyTorch casts a parameter once for all that is called in a region, and
adds the gradients in the lower precision. Each graph casts it anew (`belady.graph.casts`).

*Unused results.* Backward of a graph is one function of the gradients of all results. What leads to
none but results that the loss does not use gets None, as in plain PyTorch. What leads to others as
well gets a sum with a gradient of zero, and zero times infinity is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from belady.errors import GraphError
from belady.graph import autograd, doors
from belady.graph.joint import Joint
from belady.graph.ops import sequence_of

if TYPE_CHECKING:
    from belady.graph.capture import Captured

_ADD = torch.ops.aten.add.Tensor
_SAID = {
    "gradient sums": (
        "{} uses a tensor several times in one graph, and the tensor gets another gradient in the "
        "same backward: the order of the sum is not plain PyTorch's, which can change the last bits"
    ),
    "casts": (
        "{} casts a parameter that is used outside of the graph, too: in one region of autocast "
        "plain PyTorch casts it once for all uses, which can change the last bits of its gradient"
    ),
    "unused results": (
        "{} gives results that the loss does not use, from what leads to used ones too: a gradient "
        "of zero is added for them, where plain PyTorch adds none"
    ),
}


def summed(joint: Joint) -> tuple[int, ...]:
    """Numbers of the gradients of backward that are sums over several uses of an input."""
    uses = [leaf for step in joint.forward for leaf in _arguments(step.node)]
    backward = {node for step in joint.backward for node in step.made}
    return tuple(
        place
        for place, (primal, result) in enumerate(
            zip(joint.primals, joint.backward_outputs, strict=False)
        )
        if isinstance(result, fx.Node)
        and result.target is _ADD
        and backward.issuperset(result.all_input_nodes)
        and uses.count(primal) > 1
    )


def reached(joint: Joint) -> tuple[frozenset[int], ...]:
    """For each gradient that backward gives, the numbers of the tangents that lead to it.

    All that one node of autograd computes counts as coming from all that it gets.
    """
    nothing = frozenset[int]()
    known = {node: frozenset((number,)) for number, node in enumerate(joint.tangents)}
    for _, run in groupby(joint.backward, sequence_of):
        steps = tuple(run)
        inputs = (known.get(node, nothing) for step in steps for node in step.inputs)
        known |= dict.fromkeys((n for step in steps for n in step.made), nothing.union(*inputs))
    return tuple(known.get(result, nothing) for result in joint.backward_outputs)


def in_part(reached: Sequence[frozenset[int]], missing: frozenset[int]) -> bool:
    """Whether a gradient comes from some that are ``missing`` and others, as far as is known."""
    return not reached or any(missing & of and not of <= missing for of in reached)


def _arguments(node: fx.Node) -> list[Any]:
    return tree_leaves((node.args, node.kwargs))


class Bits:
    """Notes what can change a bit, while backwards run.

    Parameters
    ----------
    exact
        Whether that is an error.

    Attributes
    ----------
    numerics
        What a plan says of it.
    notes
        One sentence for each of these words and each root that it happened to.
    """

    def __init__(self, *, exact: bool) -> None:
        self.numerics: tuple[str, ...] = ()
        self.notes: list[str] = []
        self._exact = exact
        self._handles: list[Any] = []

    def watch(self, graph: Captured, results: Sequence[Any], *, observed: bool) -> None:
        """Look at what becomes of ``results``, with which a backward is about to return.

        Parameters
        ----------
        observed
            Whether to look at who else uses what it casts, too, which hardly ever changes; where
            bits are to be exact, that is always looked at.
        """
        if graph.summed:
            self._watch("gradient sums", graph, graph.summed, results)
        if graph.cast and (observed or self._exact):
            self._watch("casts", graph, graph.cast, results)

    def _watch(
        self, word: str, graph: Captured, places: Sequence[int], results: Sequence[Any]
    ) -> None:
        assert graph.joint is not None
        primals, name = graph.joint.primals, graph.name
        tensors = [n for n in primals if isinstance(doors.fake_value(n), torch.Tensor)]
        given = [place for place in places if results[place] is not None]
        joined = autograd.Joined(lambda: self.found(word, name), later=word == "casts")
        self._handles += joined.when(
            [tensors.index(primals[place]) for place in given], [results[it] for it in given]
        )

    def forget(self) -> None:
        """The backward is over."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def found(self, word: str, name: str) -> None:
        """Note that ``word`` holds of the root ``name``.

        Raises
        ------
        GraphError
            If bits are to be exact.
        """
        said = _SAID[word].format(name)
        if self._exact:
            raise GraphError(f"{said}; exact=True forbids that: use engine='eager'")
        if said not in self.notes:
            self.notes.append(said)
            self.numerics = tuple(sorted({*self.numerics, word}))
