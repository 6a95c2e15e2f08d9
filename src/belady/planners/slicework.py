"""What running modules in slices costs: a measure to choose among sections that all fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from belady.ir.plan import Section
from belady.ir.trace import Trace

# What an op costs on each slice beside its bytes, as bytes: a start, and a last wave not full.
_A_SLICE = 8 << 20


class Work:
    """Bytes that the ops of a trace touch under sections, and what so many slices cost beside."""

    def __init__(self, trace: Trace) -> None:
        self._touched = _touched_bytes(trace)

    def __call__(self, sections: Sequence[Section]) -> int:
        """Bytes; smaller is better."""
        total = 0
        for op in self._touched:
            within = (it.slices for it in sections if inside(op.path, it.modules))
            slices = next(within, 1)
            # A norm over the batch reads again what it has summed up.
            total += op.nbytes * (2 if op.norm and slices > 1 else 1) + slices * _A_SLICE
        return total


def inside(path: str, modules: Sequence[str]) -> bool:
    """Whether module ``path`` is one of ``modules`` or in one; the empty path is the root."""
    return any(not name or path == name or path.startswith(f"{name}.") for name in modules)


class _Touched(NamedTuple):
    """An op in module ``path``: bytes read and made, and whether it is a norm over a batch."""

    path: str
    nbytes: int
    norm: bool


def _touched_bytes(trace: Trace) -> list[_Touched]:
    """What each op that makes bytes reads and makes."""
    found = []
    for op in trace.ops:
        read, made = ({trace.values[v].storage for v in it} for it in (op.reads, op.writes))
        if made - read:
            nbytes = sum(trace.storages[it].nbytes for it in read | made)
            found.append(_Touched(op.module, nbytes, "batch_norm" in op.name))
    return found
