"""Attention masks that are known when a graph is captured: left to the kernels that need none.

A program that finds itself compiled can make a mask where it asks for ``is_causal`` otherwise
(Hugging Face's models do, since they cannot look whether a mask of the user's masks anything while
they are traced), and no kernel of attention that takes a mask is as fast as the one that needs
none. What was done to keys and values for a mask is undone with it (`belady.graph.grouped`). Other
kernels may round otherwise: `belady.graph.untraced` says where plain PyTorch runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from belady.graph.grouped import repeated, share, shares_without_mask

# Nodes that make a mask, in order; it is the last of them.
Steps = Sequence[fx.Node]
# Larger ones are not looked at.
_MOST_ELEMENTS = 1 << 28
# Not that of `torch.nn.functional`, which something may stand in the place of.
_ATTENTION = torch._C._nn.scaled_dot_product_attention
# Positions of its arguments.
_MASK, _CAUSAL = 3, 5
# Functions and methods that give the same each time, and write to nothing that there was before.
_MAKE = {"arange", "ones", "zeros", "full", "new_ones", "new_zeros", "new_full"}
_MAKE |= {"tril", "triu", "bool", "int", "long", "float", "to"}
_COMPARE = {"le", "lt", "ge", "gt", "eq", "ne"}
_DECIDE = {"and_", "or_", "xor", "invert", "bitwise_and", "bitwise_or", "bitwise_not"}
_DECIDE |= {"and", "or", "logical_and", "logical_or", "logical_not"}
_RECKON = {"add", "sub", "mul", "neg", "abs", "diff", "cumsum", "floordiv", "mod"}
SHAPE = {"getitem", "unsqueeze", "squeeze", "view", "reshape", "expand", "expand_as"}
SHAPE |= {"broadcast_to", "transpose", "permute", "contiguous"}
# And what else reads positions of tokens, and gives no view of them.
_READ = {"embedding", "matmul"}
_PURE = frozenset(_MAKE | _COMPARE | _DECIDE | _RECKON | SHAPE)


# Whether an attention may be without a mask that these nodes make.
Leaves = Callable[[fx.Node, Steps], bool]


def any_maker(attention: fx.Node, steps: Steps) -> bool:
    """Whoever makes it."""
    return True


def drop_known(module: fx.GraphModule, leaves: Leaves = any_maker) -> int:
    """Take masks that mask nothing, or the future, off attention; gives how many there were.

    Results can differ by rounding, since other kernels run.

    Parameters
    ----------
    module
        What Dynamo captured. It is changed.
    leaves
        Which may go.
    """
    known: dict[fx.Node, Steps] = {}
    causal: dict[fx.Node, bool | None] = {}
    unused, dropped = list[fx.Node](), 0
    for node in module.graph.nodes:
        mask = _mask_of(node) if node.target is _ATTENTION else None
        if mask is None:
            continue
        if mask not in known:
            known[mask] = _made_by(mask)
        if not (steps := known[mask]) or not leaves(node, steps):
            continue
        if mask not in causal:
            causal[mask] = _is_causal(steps)
        if (past := causal[mask]) is not None:
            _without_mask(node, causal=past)
            unused.append(mask)
            dropped += 1
            repeats = repeated(node)
            if repeats and shares_without_mask(repeats):
                share(node, repeats)
                unused += repeats
    if unused:
        _erase(_closure(unused, lambda node: node.all_input_nodes), module.graph)
        module.recompile()
    return dropped


def _erase(nodes: Container[fx.Node], graph: fx.Graph) -> None:
    """Take those out that nobody uses: others of no use may write to what is there."""
    for node in reversed(graph.nodes):
        if node in nodes and _is_pure(node) and not node.users:
            graph.erase_node(node)


def _mask_of(attention: fx.Node) -> fx.Node | None:
    """The mask, where it is one of truth values, and the only thing that masks."""
    args, kwargs = attention.args, attention.kwargs
    mask = args[_MASK] if len(args) > _MASK else kwargs.get("attn_mask")
    causal = args[_CAUSAL] if len(args) > _CAUSAL else kwargs.get("is_causal", False)
    if not isinstance(mask, fx.Node) or causal is not False:
        return None
    shown = mask.meta.get("example_value")
    if not isinstance(shown, torch.Tensor) or shown.dtype is not torch.bool or shown.dim() < 2:
        return None
    return mask if shown.numel() <= _MOST_ELEMENTS else None


def _without_mask(attention: fx.Node, *, causal: bool) -> None:
    args = list(attention.args)
    kwargs = dict(attention.kwargs)
    if len(args) > _MASK:
        args[_MASK] = None
    kwargs.pop("attn_mask", None)
    if len(args) > _CAUSAL:
        args[_CAUSAL] = causal
    else:
        kwargs["is_causal"] = causal
    attention.args, attention.kwargs = tuple(args), kwargs


def _is_causal(steps: Steps) -> bool | None:
    """Whether a mask leaves the past alone; False if it leaves all, None for any other."""
    with unset_fake_temporarily(), torch.no_grad():
        value = _value(steps)
        queries, keys = value.shape[-2:]
        if value.all():
            return False
        past = torch.ones(queries, keys, dtype=torch.bool, device=value.device).tril()
        return True if queries == keys and bool((value == past).all()) else None


def _made_by(mask: fx.Node) -> Steps:
    """All that makes it, in order; empty if that is not in the graph, or may come out otherwise."""
    makers = _closure([mask], lambda node: node.all_input_nodes)
    # A view of what makes it may be written to by what else uses it.
    users = _closure(makers, lambda node: [it for it in node.users if not _reads(it)])
    return [it for it in mask.graph.nodes if it in makers] if all(map(_is_pure, users)) else []


def _closure(
    nodes: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]
) -> set[fx.Node]:
    """The nodes and all that follow, up to the first that is not pure on each way."""
    found, todo = set[fx.Node](), list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += following(node) if _is_pure(node) else ()
    return found


def _is_pure(node: fx.Node) -> bool:
    called = node.op in ("call_function", "call_method")
    return called and name_of(node) in _PURE and "out" not in node.kwargs


def _reads(node: fx.Node) -> bool:
    """Whether it does nothing else, and nothing that it gives can be written through."""
    return node.target is _ATTENTION or (node.op == "call_function" and name_of(node) in _READ)


def name_of(node: fx.Node) -> str:
    """What it calls, without underscores of operators."""
    target = node.target
    name: str = target if isinstance(target, str) else getattr(target, "__name__", "")
    # Torch 2.11 writes some operators as methods.
    special = name.startswith("__") and name.endswith("__")
    return name[2:-2] if special else name


def _value(steps: Steps) -> torch.Tensor:
    """What the last of the steps gives."""
    known: dict[fx.Node, Any] = {}
    for node in steps:
        args = fx.node.map_arg(node.args, known.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, known.__getitem__)
        if isinstance(node.target, str):
            known[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
        else:
            known[node] = node.target(*args, **kwargs)
    value: torch.Tensor = known[steps[-1]]
    return value
