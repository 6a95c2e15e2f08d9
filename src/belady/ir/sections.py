"""Sections: a trace as it will be when modules run in slices along the batch, or the tokens.

Cutting memory objects along the batch lowers the floor of a plan from the largest op to the largest
slice of one (tvDNN: Park et al., PPoPP 2018, "memory-object sectioning").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from belady.ir.cutting import Cut
from belady.ir.finding import find
from belady.ir.lives import Lives
from belady.ir.plan import Section
from belady.ir.slicing import WHOLE, Rewriting
from belady.ir.stretches import Stretch
from belady.ir.trace import Trace


def apply(trace: Trace, sections: Iterable[Section]) -> Trace:
    """Trace of the same iteration with ``sections`` in force, as `belady.sections.wrap` runs them.

    Ops of a section appear once for every slice, forward and backward stage by stage and in
    each stage slice by slice; so do the storages, values and saves that they make, with their exact
    share of the bytes. What goes into a section and what comes out of it, with their gradients,
    stay whole. Kernel seconds and workspaces are divided, host seconds are not.

    Parameters
    ----------
    trace
        With `Op.batch_dims` of what each section is cut along, see `belady.ir.along.seen_along`.

    Notes
    -----
    Ops that cutting and joining add have no seconds: what copies cost on this device is not in a
    trace. Ops, storages and saves are exactly those of the execution, but for four things: a batch
    norm in training mode is a few ops here and many small ones there (its vectors of one number a
    channel are left out, except those that live on); what a module of several ops reads or holds
    may be let go of some ops earlier or later; autograd adds to gradients that are there already in
    an order of its own; and workspaces are taken to shrink with the slice.

    Raises
    ------
    PlanMismatchError
        If the trace does not show what is needed to cut a section, naming the section.
    """
    return _rewritten(trace, tuple(sections))[2]


def names(trace: Trace, sections: Iterable[Section]) -> tuple[tuple[int, int] | None, ...]:
    """What each value of ``apply(trace, sections)`` is: a value of ``trace``, and its slice.

    The slice is -1 for a value that is whole; None stands for values that ``trace`` does not have.
    """
    writing, stretches, _ = _rewritten(trace, tuple(sections))
    slices = {part: index for stretch in stretches for index, part in enumerate(stretch.parts)}
    return tuple(
        (value.origin, slices.get(value.part, WHOLE)) if value.origin >= 0 else None
        for value in writing.values
    )


def _rewritten(trace: Trace, sections: Sequence[Section]) -> tuple[Rewriting, list[Stretch], Trace]:
    stretches = find(trace, sections)
    writing = Rewriting(trace)
    cuts = [Cut(writing, stretch) for stretch in stretches]
    forward = {stretch.forward[0]: cut for stretch, cut in zip(stretches, cuts, strict=True)}
    backward = {stretch.backward[0]: cut for stretch, cut in zip(stretches, cuts, strict=True)}
    at = 0
    while at < len(trace.ops):
        if at in forward:
            at = forward[at].forward()
        elif at in backward:
            at = backward[at].backward()
        else:
            writing.copy(at)
            at += 1
    return writing, stretches, Lives(writing, stretches).trace()
