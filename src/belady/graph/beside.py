"""What an iteration needs beside its launches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from belady.graph.doors import fake_value
from belady.graph.kinds import Kind
from belady.ir.plan import Offload, Plan
from belady.ir.trace import Trace
from belady.memory.cap import PAGE_BYTES

# What is taken outside of the graphs leaves pieces, too.
_PIECES, _PAGES = 1.1, 2


def fixed_bytes(kind: Kind) -> int:
    """Of copies of what forward is given, which stay; what lies still is not copied."""
    stays = still(kind)
    return bytes_of(node for place, node in _passing(kind).items() if place not in stays)


def look(kind: Kind, args: Sequence[Any]) -> None:
    """An iteration that may be launched is given these: note where what does not last lies."""
    before = kind.prospect.lies
    places = _passing(kind) if before is None else before
    lies = {it: _address(args[it]) for it in places}
    known = lies if before is None else before
    kind.prospect.lies = {it: at if known[it] == at else 0 for it, at in lies.items()}


def still(kind: Kind) -> set[int]:
    """Places of inputs that do not last and lay where they lie each time that was looked at.

    A batch that a program copies to the same tensor each time is such a one.
    """
    return {place for place, at in (kind.prospect.lies or {}).items() if at}


def _passing(kind: Kind) -> dict[int, fx.Node]:
    """Inputs of forward that do not last, neither parameters nor buffers, by place."""
    if kind.force is None:
        return {}
    part = kind.force.drawn.parts[0]
    pairs = zip(part.joint.primals, part.inputs, strict=True)
    return {it: node for it, (node, name) in enumerate(pairs) if name not in part.kinds}


def _address(arg: Any) -> int:
    """Where a tensor lies whose bytes are its numbers; 0 for what is none, or conjugate."""
    lies = isinstance(arg, torch.Tensor) and not arg.is_conj() and not arg.is_neg()
    return arg.data_ptr() if lies else 0


def between_bytes(kind: Kind, *, lends: bool) -> int:
    """The most that is needed while nothing is launched, of what cannot lie where launches write.

    That is of the loss, with results that are copies, or of what follows backward: without an
    optimizer's step where ``lends`` says that it is lent what it takes.
    """
    if kind.force is None:
        return 0
    parts = kind.force.drawn.parts
    loss = bytes_of(parts[0].joint.forward_outputs) + max(part.outside_bytes for part in parts)
    after = (it.outside_bytes if lends else it.beside_bytes for it in kind.samples)
    return int(_PIECES * max(loss, *after, 0)) + _PAGES * PAGE_BYTES


def stepping_bytes(kind: Kind) -> int:
    """The most that an optimizer's step has taken beside what it keeps; 0 where nobody counts."""
    return max((it.stepping_bytes for it in kind.samples), default=0)


def bytes_of(nodes: Iterable[Any]) -> int:
    """Of what these nodes stand for."""
    values = (fake_value(node) for node in nodes if isinstance(node, fx.Node))
    return sum(it.nbytes for it in values if isinstance(it, torch.Tensor))


def sent(trace: Trace, plan: Plan) -> dict[int, int]:
    """Bytes of each value that goes to host memory."""
    return {
        value: trace.storages[trace.values[value].storage].nbytes
        for value, decision in plan.decisions.items()
        if isinstance(decision, Offload)
    }
