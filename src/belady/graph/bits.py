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

*Layouts.* AOTAutograd lays gradients that come in out as the results lie. Plain PyTorch goes on
with them as they are, expanded ones of a sum, say, and the sums of a norm go along their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from belady.errors import GraphError
from belady.graph import autograd, doors
from belady.graph.captured import Captured
from belady.graph.joint import Joint
from belady.graph.ops import sequence_of
from belady.graph.replays import is_training_norm
from belady.memory.geometry import steps_of

_ADD = torch.ops.aten.add.Tensor
_CLONE = torch.ops.aten.clone.default
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
    "checkpointed norms": (
        "{} has a batch norm in a checkpoint, which plain PyTorch runs again in backward: its "
        "statistics are updated once, and not twice"
    ),
    "gradient layouts": (
        "{} ends in a norm or a sum whose gradient does not lie in memory as its result does: sums "
        "over it are in another order than plain PyTorch's, which can change the last bits"
    ),
}
_SUMS = frozenset(
    {"aten.sum.dim_IntList", "aten.sum.default", "aten.mean.dim", "aten.mean.default"}
)
_NORMS = frozenset({"aten.native_batch_norm_backward.default"})
_SHOWS = frozenset(
    f"aten.{name}"
    for name in ("view.default", "expand.default", "permute.default", "transpose.int")
)


def has_checkpointed_norms(joint: Joint) -> bool:
    """Whether a batch norm in a user's checkpoint updates statistics."""
    return any("recompute" in it.node.meta and is_training_norm(it) for it in joint.forward)


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
        and (total := _as_made(result)).target is _ADD
        and backward.issuperset(total.all_input_nodes)
        and uses.count(primal) > 1
    )


def _as_made(result: fx.Node) -> fx.Node:
    """What is returned, before it was laid out as its input is."""
    while result.target is _CLONE:
        (result,) = result.all_input_nodes
    return result


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


class Incoming:
    """What can be said of the gradients that a backward is given.

    Parameters
    ----------
    reached
        See `reached`.
    """

    def __init__(self, joint: Joint, reached: Sequence[frozenset[int]]) -> None:
        self._reached = reached
        # By tangent: its layout as it was traced, and whether to look at expanded dimensions too.
        self._traced = {
            number: (doors.fake_value(tangent), directly)
            for number, tangent in enumerate(joint.tangents)
            if (directly := _summed_directly(tangent)) is not None
        }

    def words(self, gradients: Sequence[torch.Tensor | None] | None) -> Iterator[str]:
        """What holds of them.

        Parameters
        ----------
        gradients
            By result, None where the loss does not use it; None if some are not used, and it is
            not known which.
        """
        if gradients is None:
            yield "unused results"
            return
        missing = frozenset(number for number, it in enumerate(gradients) if it is None)
        if missing and _in_part(self._reached, missing):
            yield "unused results"
        for number, (traced, directly) in self._traced.items():
            given = gradients[number]
            if given is not None and not _lies_as(given, traced, expanded=directly):
                yield "gradient layouts"


def _in_part(reached: Sequence[frozenset[int]], missing: frozenset[int]) -> bool:
    """Whether a gradient comes from some that are ``missing`` and others, as far as is known."""
    return not reached or any(missing & of and not of <= missing for of in reached)


def _summed_directly(tangent: fx.Node) -> bool | None:
    """Whether backward sums over a tangent in the order of its bytes, and not over a product of it.

    None if it does neither. What is only folded before it is summed is copied in plain PyTorch as
    well, if it does not lie as its result does.
    """
    pending, products = [tangent], set[fx.Node]()
    found = None
    while pending:
        node = pending.pop()
        shown = node not in products
        for user in node.users:
            name = str(user.target)
            if name in _NORMS and shown:
                return True
            if name in _NORMS or (name in _SUMS and not shown):
                found = False
            elif torch.Tag.pointwise in getattr(user.target, "tags", ()):
                if (node is tangent or not shown) and user not in products:
                    products.add(user)
                    pending.append(user)
            elif name in _SHOWS and shown:
                pending.append(user)
    return found


def _lies_as(tensor: torch.Tensor, other: torch.Tensor, *, expanded: bool) -> bool:
    """Whether two tensors of one shape lie in one way.

    Parameters
    ----------
    expanded
        Whether dimensions of the first matter that show one element in all places: a product of
        such a tensor lies as the other factor does.
    """
    pairs = zip(steps_of(tensor), steps_of(other), strict=True)
    return all(mine == theirs or (mine == 0 and not expanded) for mine, theirs in pairs)


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
