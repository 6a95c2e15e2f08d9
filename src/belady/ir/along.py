"""Where the rows are that sections cut: samples in some, tokens in others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from belady.errors import PlanMismatchError
from belady.ir.finding import forward_ops, title
from belady.ir.ops import Phase
from belady.ir.plan import Section
from belady.ir.trace import Trace

# `Op.batch_dims` of each op of a trace, for rows along one dimension; none where that is not known.
Dims = Sequence[tuple[int | None, ...]]


def seen_along(
    trace: Trace, sections: Iterable[Section], dims: Callable[[int], Dims | None]
) -> Trace:
    """The trace with `Op.batch_dims` in each of ``sections`` of the rows that it cuts.

    Parameters
    ----------
    trace
        With those of the batch.
    dims
        Those along another dimension.

    Raises
    ------
    PlanMismatchError
        If they are not known.
    """
    ops = list(trace.ops)
    for section in sections:
        if section.along:
            found = dims(section.along)
            if found is None:
                raise PlanMismatchError(
                    f"section {title(section)!r} cannot be applied: where the {section.whole} are "
                    "is not known"
                )
            for at in _own(trace, section):
                ops[at] = replace(ops[at], batch_dims=found[at])
    return replace(trace, ops=tuple(ops))


def _own(trace: Trace, section: Section) -> Iterable[int]:
    """Forward ops of a section in all passes, and backward from the first to the last of them."""
    for index in range(len(trace.roots)):
        forward = forward_ops(trace, section, index)
        yield from forward
        inside = set(forward)
        back = [
            at
            for at, op in enumerate(trace.ops)
            if op.phase is Phase.BACKWARD and op.forward_op in inside
        ]
        # Sums of gradients in between are of no forward op.
        yield from range(back[0], back[-1] + 1) if back else ()
