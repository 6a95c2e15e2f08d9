"""May a section run in slices? From the modules, then from what their ops do to the batch."""

from __future__ import annotations

import torch

from belady.errors import PlanMismatchError, SectionError
from belady.ir.finding import find
from belady.ir.plan import Section
from belady.ir.samples import mixing
from belady.ir.trace import Trace
from belady.sections.batchnorm import BatchNorm
from belady.sections.standins import StandIns
from belady.sections.wrap import locate


def reasons(model: torch.nn.Module, section: Section, trace: Trace) -> tuple[str, ...]:
    """Reasons against running ``section`` of ``model`` in slices; none if it may be tried.

    Parameters
    ----------
    trace
        Of a call of ``model``, from `belady.measure.batch.static_trace_with_batch`.

    Notes
    -----
    Only what is known to be right is allowed. What passes is still to be tried on numbers, see
    `belady.sections.trial`: module code may do what ops do not show (count its calls, branch).
    """
    try:
        locate(model, section, StandIns())
    except SectionError as error:
        return (str(error),)
    found = mixing(trace, section)
    if found:
        return found
    try:
        stretches = find(trace, [section])
    except PlanMismatchError as error:
        return (str(error),)
    modules = dict(model.named_modules())
    return tuple(
        f"{trace.locate(at)} takes statistics of the batch, and is not in a BatchNorm module"
        for stretch in stretches
        for at in sorted(stretch.norms)
        if type(modules.get(trace.ops[at].module)) not in BatchNorm.KINDS
    )
