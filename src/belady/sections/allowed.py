"""May a section run in slices? From the modules, then from what their ops do to the batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from belady.errors import PlanMismatchError, SectionError
from belady.ir.drawing import draws_factors_or_mask
from belady.ir.finding import find, forward_ops
from belady.ir.plan import Section
from belady.ir.samples import mixing
from belady.ir.trace import Trace
from belady.sections.batchnorm import BatchNorm
from belady.sections.dropout import draws_for_all
from belady.sections.standins import StandIns
from belady.sections.wrap import locate


def reasons(model: torch.nn.Module, section: Section, trace: Trace) -> tuple[str, ...]:
    """Reasons against running ``section`` of ``model`` in slices; none if it may be tried.

    Parameters
    ----------
    trace
        Of a call of ``model``, from `belady.measure.batch.static_trace_with_batch`, with the
        dimension that the section is cut along.

    Notes
    -----
    Only what is known to be right is allowed. What passes is still to be tried on numbers, see
    `belady.sections.trial`: module code may do what ops do not show (count its calls, branch).
    """
    try:
        locate(model, section, StandIns())
    except SectionError as error:
        return (str(error),)
    modules = dict(model.named_modules())
    found = (*_drawn_elsewhere(modules, section, trace), *mixing(trace, section))
    if found:
        return found
    try:
        stretches = find(trace, [section])
    except PlanMismatchError as error:
        return (str(error),)
    norms = [at for stretch in stretches for at in sorted(stretch.norms)]
    if section.along:
        return tuple(f"{trace.locate(at)} takes statistics of all {section.whole}" for at in norms)
    return tuple(
        f"{trace.locate(at)} takes statistics of the batch, and is not in a BatchNorm module"
        for at in norms
        if type(modules.get(trace.ops[at].module)) not in BatchNorm.KINDS
    )


def _drawn_elsewhere(
    modules: Mapping[str, torch.nn.Module], section: Section, trace: Trace
) -> Iterator[str]:
    """Ops that draw as a dropout does, but in no module of which slices can share the numbers."""
    for index in range(len(trace.roots)):
        for at in forward_ops(trace, section, index):
            op = trace.ops[at]
            if draws_factors_or_mask(op) and not draws_for_all(modules.get(op.module)):
                yield (
                    f"{trace.locate(at)} draws random numbers outside of an nn.Dropout, and slices "
                    f"would draw others than the {section.whole}"
                )
