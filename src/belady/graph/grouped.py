"""Keys and values that heads share, where a program repeats them only because there is a mask.

Hugging Face's models hand them to kernels as they are, and beside a mask, with which those kernels
are slow, once for each head of queries (``use_gqa_in_sdpa`` in ``integrations.sdpa_attention``).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from inspect import signature
from typing import Any

from torch import fx

_MODULE = "transformers.integrations.sdpa_attention"
_REPEATS = "repeat_kv"
# What it calls, the last first, and positions of keys and values.
_CALLS, _POSITIONS = ("reshape", "expand", "getitem"), (1, 2)
_CALL = re.compile(r"File \"(.+?)\", line \d+, in (\w+)")


def calls_to(node: fx.Node) -> list[tuple[str, str]]:
    """Files and functions of the program's calls that lead to a node, the innermost last."""
    return _CALL.findall(node.stack_trace or "")


def repeated(attention: fx.Node) -> list[fx.Node]:
    """Keys and values of an attention, if the program has repeated them; else none."""
    given = [attention.args[at] for at in _POSITIONS if len(attention.args) > at]
    found = [it for it in given if isinstance(it, fx.Node) and _repeats(it)]
    return found if len(found) == len(_POSITIONS) else []


def shares_without_mask(nodes: Sequence[fx.Node]) -> bool | None:
    """Whether, with no mask, it would not have repeated these; None where that is not known."""
    asks = getattr(sys.modules.get(_MODULE), "use_gqa_in_sdpa", None)
    values = [it.meta["example_value"] for it in map(_source, nodes) if it is not None]
    if asks is None or len(values) < len(nodes):
        return None
    # Older versions look at keys alone.
    return bool(asks(None, *values[: len(signature(asks).parameters) - 1]))


def share(attention: fx.Node, nodes: Sequence[fx.Node]) -> None:
    """Have heads share again what is known to be `repeated` for a mask."""
    args: list[Any] = list(attention.args)
    for at, node in zip(_POSITIONS, nodes, strict=True):
        args[at] = _source(node)
    attention.args, attention.kwargs = tuple(args), {**attention.kwargs, "enable_gqa": True}


def _source(node: fx.Node) -> fx.Node | None:
    """What was repeated; None where that was done in another way."""
    at: Any = node
    for name in _CALLS:
        if not isinstance(at, fx.Node) or not _repeats(at):
            return None
        if name != getattr(at.target, "__name__", at.target):
            return None
        at = at.args[0]
    return at if isinstance(at, fx.Node) else None


def _repeats(node: fx.Node) -> bool:
    return [name for _, name in calls_to(node)[-1:]] == [_REPEATS]
