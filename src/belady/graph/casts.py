"""Parameters that autocast casts once for all their uses, where tracing casts them for each.

Autocast remembers the lower-precision copy of a parameter until its outermost region ends: autograd
adds the gradients of all uses in the lower precision and casts the sum. AOTAutograd traces without
that cache: each use has a copy, and the sum is taken in the higher precision, with other bits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.utils._pytree import tree_leaves

from belady.errors import TraceError
from belady.graph.doors import fake_value, is_forward

_CAST = torch.ops.aten._to_copy.default
_ADD = torch.ops.aten.add.Tensor


@dataclass(frozen=True, slots=True)
class Remembered:
    """What the cache of autocast holds of one captured graph (`aten::cached_cast`, torch 2.13).

    Attributes
    ----------
    places
        Numbers of the parameters whose casts to ``dtype`` it remembers.
    unsure
        Numbers of the inputs of which that is not known: what is cast twice is refused.
    """

    places: frozenset[int]
    unsure: frozenset[int]
    dtype: torch.dtype

    @classmethod
    def of(cls, module: fx.GraphModule, inputs: Sequence[Any], device: str) -> Remembered:
        """Of what Dynamo captured, about to be called with ``inputs``, on a type of device."""
        trained = {n for n, it in enumerate(inputs) if _gets_gradients(it)}
        around = torch.is_autocast_enabled(device)
        regions = _regions(module)
        dtype: Any = torch.get_autocast_dtype(device)
        if regions and not around:
            dtype = regions[0].dtype or dtype
        if not regions and not (around and torch.is_autocast_cache_enabled()):
            return cls(frozenset(), frozenset(), dtype)
        # A checkpoint begins a region of its own when it runs again, perhaps in a backward.
        parted = sum(isinstance(it, fx.GraphModule) for it in module.modules()) > 1
        alike = all(it.dtype in (None, dtype) and it.caches is not False for it in regions)
        several = not around and len({it.outermost for it in regions}) > 1
        if parted or several or not alike or not torch.is_autocast_cache_enabled():
            return cls(frozenset(), frozenset(trained), dtype)
        # Whether any other tensor is a leaf can change from call to call.
        known = {n for n in trained if isinstance(inputs[n], torch.nn.Parameter)}
        return cls(frozenset(known), frozenset(trained - known), dtype)

    def share(self, joint: fx.GraphModule, outputs: int) -> tuple[int, ...]:
        """Have each of these parameters cast once, and its gradients added before they are cast.

        Parameters
        ----------
        outputs
            How many results of the joint graph are those of forward.

        Returns
        -------
        tuple of int
            Numbers of the inputs that are cast.

        Raises
        ------
        TraceError
            If it is not known how plain PyTorch would add them.
        """
        holders = joint.graph.find_nodes(op="placeholder")
        primals = [node for node in holders if "tangents" not in str(node.target)]
        cast = []
        for place, primal in enumerate(primals):
            casts = list(self._casts(primal))
            if place in self.unsure:
                _refuse_several(primal)
            elif place in self.places and casts:
                cast.append(place)
                if len(casts) > 1:
                    _one_gradient(joint.graph, outputs + place, casts)
                    _one_cast(casts)
        return tuple(cast)

    def _casts(self, source: fx.Node) -> Iterator[fx.Node]:
        """Casts that autocast makes of an input, and not the user, in order."""
        for user in source.users:
            taken = user.target is _CAST and user.kwargs == {"dtype": self.dtype}
            if taken and is_forward(user) and _for_its_user(user):
                yield user


def share_all(joint: fx.GraphModule) -> None:
    """Have each input cast once, whoever casts it, and its gradients added as they are."""
    found: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in joint.graph.find_nodes(op="call_function", target=_CAST):
        source = node.args[0]
        if is_forward(node) and isinstance(source, fx.Node) and source.op == "placeholder":
            found[source, *sorted(node.kwargs.items())].append(node)
    for casts in found.values():
        _one_cast(casts)


class _Region(NamedTuple):
    """A region in which autocast casts, and the number of the outermost one that it lies in."""

    outermost: int
    dtype: torch.dtype | None
    caches: bool | None


def _regions(module: fx.GraphModule) -> list[_Region]:
    """Of the graph, and of those that it calls: each of these by itself."""
    found, depth, outermost = list[_Region](), 0, 0
    graphs = [it.graph for it in module.modules() if isinstance(it, fx.GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes):
        if node.target is _enter_autocast:
            outermost += depth == 0
            depth += 1
            _, dtype, enabled, caches = node.args
            if enabled:
                found.append(_Region(outermost, dtype, caches))
        depth -= node.target is _exit_autocast
    return found


def _gets_gradients(given: Any) -> bool:
    return (
        isinstance(given, torch.Tensor)
        and given.dtype is torch.float32
        and given.requires_grad
        and not (isinstance(given, torch.nn.Parameter) and given._is_view())
    )


def _refuse_several(primal: fx.Node) -> None:
    casts = Counter(
        it.kwargs.get("dtype") for it in primal.users if it.target is _CAST and is_forward(it)
    )
    for dtype, count in casts.items():
        if count > 1:
            raise TraceError(
                f"{primal} is cast to {dtype} {count} times, and it is not known how often "
                "autocast does that"
            )


def _for_its_user(cast: fx.Node) -> bool:
    """Whether what the user called is what needs the cast, and not the cast itself."""
    called = cast.meta.get("source_fn_stack")
    users = (user for user in cast.users if is_forward(user))
    return bool(called) and all(user.meta.get("source_fn_stack") == called for user in users)


def _one_cast(casts: Sequence[fx.Node]) -> None:
    """Have the first one serve for all."""
    first = casts[0]
    for other in casts[1:]:
        users = list(other.users)
        other.replace_all_uses_with(first)
        _lie_elsewhere(fake_value(other), users)
        other.graph.erase_node(other)


def _lie_elsewhere(before: torch.Tensor, users: Iterable[fx.Node]) -> None:
    """Have views lie on the bytes of what they are made of by now, instead of on ``before``."""
    storage, left = before.untyped_storage()._cdata, list(users)
    while left:
        node = left.pop()
        shown = [it for it in tree_leaves(fake_value(node)) if isinstance(it, torch.Tensor)]
        if any(it.untyped_storage()._cdata == storage for it in shown):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), fake_value)
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
            left += node.users


def _one_gradient(graph: fx.Graph, place: int, casts: Iterable[fx.Node]) -> None:
    """Add what comes back through ``casts`` as it comes, and cast the sum.

    Autograd adds to what one node of its graph is to get in the order in which those before it run.

    Raises
    ------
    TraceError
        If something else is added, as it is not known when.
    """
    results = tree_leaves(graph.find_nodes(op="output")[0].args, is_leaf=lambda leaf: leaf is None)
    gradient = results[place]
    if not isinstance(gradient, fx.Node):
        return
    sums, parts = _added(gradient)
    of_casts = {cast.meta.get("seq_nr") for cast in casts}
    if any(part.target is not _CAST or part.meta.get("seq_nr") not in of_casts for part in parts):
        raise TraceError(f"{gradient} adds gradients of uses that autocast casts once to others")
    if not sums:
        return
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    terms = sorted(_handed_over(parts, casts), key=numbers.__getitem__)
    total = terms[0]
    for term in terms[1:]:
        with graph.inserting_after(term):
            added = graph.call_function(_ADD, (total, term))
        added.meta = term.meta | {"val": torch.add(fake_value(total), fake_value(term))}
        total = added
    with graph.inserting_after(total):
        final = graph.node_copy(parts[-1], lambda node: total)
    gradient.replace_all_uses_with(final)
    for node in (*sums, *parts):
        graph.erase_node(node)


def _handed_over(parts: Sequence[fx.Node], casts: Iterable[fx.Node]) -> list[fx.Node]:
    """What is cast back, each made by the node of autograd that gives it, and no two by one.

    Else the order in which they are made is not that in which they are added.

    Raises
    ------
    TraceError
        If it is not so.
    """
    users = {it.meta.get("seq_nr"): [u for u in it.users if is_forward(u)] for it in casts}
    terms, givers = list[fx.Node](), set[Any]()
    for part in parts:
        (term,) = part.all_input_nodes
        by = {user.meta.get("seq_nr") for user in users[part.meta.get("seq_nr")]}
        if by != {term.meta.get("seq_nr")} or is_forward(term) or by & givers:
            raise TraceError(f"it is not known in which order plain PyTorch would add to {term}")
        givers |= by
        terms.append(term)
    return terms


def _added(gradient: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The sums that make a gradient, each before those that it adds, and what they add."""
    sums, parts, left = [], [], [gradient]
    while left:
        node = left.pop()
        inputs = node.all_input_nodes
        if node.target is _ADD and len(inputs) == 2 and len(node.users) == 1:
            sums.append(node)
            left += inputs
        else:
            parts.append(node)
    return sums, parts
