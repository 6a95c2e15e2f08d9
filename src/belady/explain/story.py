"""What is told of a run: values one by one, and what a module saves as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from belady.explain.document import Explanation, ModuleStory, Share, ValueStory
from belady.explain.stays import sharing, why_it_stays
from belady.explain.subjects import Subject, by_size, find, is_value, modules
from belady.explain.weigh import Scales
from belady.ir.run import Run
from belady.ir.trace import Tier, Trace
from belady.report.distance import distance
from belady.report.facts import decision_name, short_name, subject

# Saved values that are told of when nothing in particular is asked, and of a module.
LARGEST = 10
LARGEST_OF_MODULE = 3


def explain(
    run: Run, what: str | None = None, progress: Callable[[str], None] | None = None
) -> Explanation:
    """Say why a value or module went where it went, and what any other choice would cost.

    Parameters
    ----------
    run
        Its ``measured`` may be None, and its plan over the budget.
    what
        Id of a value, path of a module or pattern of paths; by default the largest saved values.
    progress
        Called with a few words before each part that takes several simulations.

    Raises
    ------
    UnknownSubjectError
        If nothing is called ``what``; the message names what comes near.
    PlanMismatchError
        If the plan of the run cannot be simulated: it is for another trace, or breaks a rule.
    """
    tell = progress or _silence
    asked = _largest(run.trace) if what is None else find(run.trace, what)
    scales = Scales(run)
    module = None
    if asked.modules is not None and what is not None:
        tell(f"all of {what} at once")
        module = _module(scales, what, asked)
    shown = asked.values if module is None else asked.values[:LARGEST_OF_MODULE]
    values = []
    for at, value in enumerate(shown, start=1):
        tell(f"value {value}, {at} of {len(shown)}")
        values.append(_value(scales, value))
    beneath = distance(run, scales.planned.seconds)
    return Explanation(
        what=what or "",
        subject=subject(run),
        budget_bytes=run.plan.budget.device_bytes,
        saved=len(run.trace.saved),
        planned=scales.planned,
        measured_seconds=run.measured.seconds if run.measured else None,
        problems=scales.problems,
        values=tuple(values),
        module=module,
        notes=tuple(_notes(run, scales, what or "")),
        bound_seconds=beneath.seconds,
        bound=beneath.sentence,
    )


def _silence(_: str) -> None:
    """Report no progress."""


def _largest(trace: Trace) -> Subject:
    return Subject(by_size(trace, trace.saved)[:LARGEST])


def _notes(run: Run, scales: Scales, what: str) -> Iterator[str]:
    if is_value(what) and what in modules(run.trace):
        yield f"{what} is the number of a value; the module that is called so is '[{what}]'"
    now, then = scales.planned, run.predicted
    if (now.seconds, now.peak_bytes) != (then.seconds, then.peak(Tier.DEVICE)):
        yield (
            "the run was predicted by another version of belady or by other means; all figures "
            "here are predicted now"
        )


def _value(scales: Scales, index: int) -> ValueStory:
    trace, plan = scales.run.trace, scales.run.plan
    value = trace.values[index]
    storage = trace.storages[value.storage]
    save = min(value.saves, key=attrgetter("packed"), default=None)
    at = save.op if save is not None else value.producer
    reasons = {it.value: it.reason for it in plan.assignments}
    read, stay = value.first_read, why_it_stays(trace, index)
    return ValueStory(
        value=index,
        kind=storage.kind.value,
        module=save.module if save else trace.ops[at].module if at >= 0 else "",
        saved_by=short_name(trace.ops[at].name) if at >= 0 else "",
        as_input=save.as_input if save else False,
        shape=save.shape if save else (),
        dtype=save.dtype if save else "",
        nbytes=storage.nbytes,
        saved_at=value.first_save if save else -1,
        read_at=-1 if read is None else read,
        seconds=_seconds(scales, index),
        decision=decision_name(plan, index),
        reason=reasons.get(index, ""),
        shares=tuple(other for other in sharing(trace, index) if other != index),
        stays=stay.why if stay else "",
        weighed=scales.weigh((index,)),
    )


def _seconds(scales: Scales, index: int) -> float:
    """Time for which a value is saved and not read."""
    value = scales.run.trace.values[index]
    if not value.saves:
        return 0.0
    end = value.dropped if value.first_read is None else value.first_read
    return float(scales.times[end] - scales.times[value.first_save])


def _module(scales: Scales, name: str, asked: Subject) -> ModuleStory:
    trace, plan = scales.run.trace, scales.run.plan
    decisions: dict[str, list[int]] = {}
    stays: dict[str, list[int]] = {}
    for value in asked.values:
        decisions.setdefault(decision_name(plan, value), []).append(value)
        stay = why_it_stays(trace, value)
        if stay is not None:
            stays.setdefault(stay.kind, []).append(value)
    return ModuleStory(
        name=name,
        modules=asked.modules or (),
        values=len(asked.values),
        nbytes=_bytes(trace, asked.values),
        decisions=_shares(trace, decisions),
        stays=_shares(trace, stays),
        weighed=scales.weigh(asked.values),
    )


def _shares(trace: Trace, groups: Mapping[str, Sequence[int]]) -> tuple[Share, ...]:
    """Each group counted, the largest first."""
    found = [Share(name, len(group), _bytes(trace, group)) for name, group in groups.items()]
    return tuple(sorted(found, key=lambda share: (-share.nbytes, share.name)))


def _bytes(trace: Trace, values: Iterable[int]) -> int:
    storages = {trace.values[value].storage for value in values}
    return sum(trace.storages[storage].nbytes for storage in storages)
