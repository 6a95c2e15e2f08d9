"""Movements at the seams of fused kernels: where an op that no compiler fuses begins or ends.

A run of ops is compiled from one movement to the next. One in the middle of ops that would be one
kernel makes two of them, which write and read again what is between. So copies begin, and bytes go,
a few ops later than planned, and bytes come back a few ops earlier.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from belady.graph.joint import Joint, Step
from belady.graph.layout import Layout
from belady.graph.ops import is_fused, name_of
from belady.graph.orders import Act, Acts, Orders


def at_seams(orders: Orders, joint: Joint, layout: Layout) -> Orders:
    """The orders, with every movement of a value at the seam next to where it is due."""
    forward, backward = (_seams(steps, layout) for steps in (joint.forward, joint.backward))
    return replace(
        orders,
        forward=_moved(orders.forward, forward),
        backward=_moved(orders.backward, backward),
    )


def read_in_run(
    steps: Sequence[Step],
    layout: Layout,
    acts: Mapping[int, list[tuple[Act, int]]],
    moved: Sequence[fx.Node],
) -> list[list[fx.Node]]:
    """Of what was ``moved``, what each run that may be fused reads: at its first op, of each op."""
    ops = [step for step in steps if layout.is_op(step)]
    ends, found, start = {*_seams(steps, layout), *acts}, [list[fx.Node]() for _ in ops], 0
    for at, step in enumerate(ops):
        start = at if at in ends else start
        found[start] += [node for node in step.inputs if node in moved]
    return found


def _seams(steps: Sequence[Step], layout: Layout) -> list[int]:
    """Boundaries of a part beside an op that is not fused, and its ends."""
    fused = [is_fused(name_of(step)) for step in steps if layout.is_op(step)]
    inner = (at for at in range(1, len(fused)) if not (fused[at - 1] and fused[at]))
    return [0, *inner, len(fused)] if fused else [0]


def _moved(acts: Mapping[int, list[tuple[Act, int]]], seams: Sequence[int]) -> Acts:
    due = [(at, act, value) for at in sorted(acts) for act, value in acts[at]]
    moved = {(act, value): _seam(at, act, seams) for at, act, value in due}
    found: list[tuple[int, Act, int]] = []
    for at, act, value in due:
        freed, back = (moved.get((it, value)) for it in (Act.FREE, Act.BRING))
        crossed = freed is not None and back is not None and back < freed
        found.append((at if crossed else moved[act, value], act, value))
    result: Acts = {}
    # What goes makes room for what comes.
    for at, act, value in sorted(found, key=lambda it: it[:2]):
        result.setdefault(at, []).append((act, value))
    return result


def _seam(at: int, act: Act, seams: Sequence[int]) -> int:
    if act is Act.ENCODE:
        return at
    if act is Act.BRING:
        return seams[bisect_right(seams, at) - 1]
    return seams[bisect_left(seams, at)] if at <= seams[-1] else at
