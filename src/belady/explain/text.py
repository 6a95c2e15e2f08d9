"""An explanation as plain text: the decision, what it costs, and the next best choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from belady.explain.document import (
    Choice,
    Explanation,
    ModuleStory,
    Outcome,
    Share,
    ValueStory,
    Weighed,
)
from belady.units import format_bytes, format_seconds, printable


def describe(explanation: Explanation) -> str:
    """Say what was decided, why, what it costs, and what the next best choice would.

    Names from the user's model are escaped: nothing in the text can steer a terminal.

    Returns
    -------
    str
        Lines, each ended by a newline.
    """
    parts = [_head(explanation)]
    one = explanation.what and explanation.module is None
    if explanation.module is not None:
        parts.append(_module(explanation, explanation.module))
    if one:
        parts += [_full(explanation, story) for story in explanation.values]
    else:
        parts.append(_largest(explanation))
        parts += [_short(explanation, story) for story in explanation.values]
        parts.append(_tail(explanation))
    sections = ["\n".join(printable(line) for line in part) for part in map(list, parts)]
    return "\n\n".join(section for section in sections if section) + "\n"


def _head(it: Explanation) -> Iterator[str]:
    yield it.subject
    planned = it.planned
    spent = [f"{format_seconds(planned.stall_seconds)} of it waiting for copies"]
    if planned.replay_seconds:
        spent.append(f"{format_seconds(planned.replay_seconds)} recomputing")
    measured = it.measured_seconds
    seen = "" if measured is None else f"; measured: {format_seconds(measured)}"
    yield f"Predicted: {format_seconds(planned.seconds)} an iteration, {', '.join(spent)}{seen}"
    yield (
        f"           a peak of {format_bytes(planned.peak_bytes)}, which "
        f"{_budget(planned.needed_bytes, it.budget_bytes)}"
    )
    if it.bound:
        yield it.bound
    for problem in it.problems:
        yield f"The plan as it is may not run: {problem}"
    yield from (f"Note: {note}" for note in it.notes)


def _budget(needed: int, given: int) -> str:
    """A budget beside the one that was given."""
    text = f"needs a budget of {format_bytes(needed)}"
    if needed <= given:
        return f"{text}; {format_bytes(given)} are given"
    # What is rounded for reading may not be enough, so the exact figure is there as well.
    more = format_bytes(needed - given)
    return f"{text} ({needed} bytes), {more} more than the {format_bytes(given)} given"


def _full(it: Explanation, story: ValueStory) -> Iterator[str]:
    yield f"Value {story.value}: {_origin(story)}"
    yield f"  {_geometry(story)}"
    if story.saved_at >= 0:
        yield f"  {_lifetime(story)}"
    if story.shares:
        others = ", ".join(map(str, story.shares))
        yield f"  It shares its bytes with saved values {others}: they move together or not at all."
    yield f"  Decision: {_decision(story)}"
    if story.stays:
        yield f"  It cannot move: {story.stays}."
    if story.weighed is not None:
        yield from _in_full(it, story.weighed)


def _short(it: Explanation, story: ValueStory) -> Iterator[str]:
    yield f"Value {story.value}: {format_bytes(story.nbytes)}, {_origin(story)}"
    yield f"  {_decision(story)}"
    if story.stays:
        yield f"  It cannot move: {story.stays}."
    if story.weighed is not None:
        yield from (f"  {line}" for line in _cost(it, story.weighed))
        yield f"  {_next_best(story.weighed)}"


def _module(it: Explanation, story: ModuleStory) -> Iterator[str]:
    yield f"Module {story.name}: {_count(story.values)}, {format_bytes(story.nbytes)}"
    if len(story.modules) > 1:
        yield f"  in {len(story.modules)} modules, {story.modules[0]} to {story.modules[-1]}"
    yield from (f"  {_share(share)}" for share in story.decisions)
    for share in story.stays:
        yield f"  cannot move: {_count(share.values)}, {format_bytes(share.nbytes)}, {share.name}"
    if story.weighed is not None:
        yield from _in_full(it, story.weighed)


def _in_full(it: Explanation, weighed: Weighed) -> Iterator[str]:
    """What the decision costs, every other choice, and the next best."""
    yield from (f"  {line}" for line in _cost(it, weighed))
    yield ""
    yield from _choices(it, weighed)
    yield ""
    yield f"  {_next_best(weighed)}"


def _share(share: Share) -> str:
    return f"{share.name}: {_count(share.values)}, {format_bytes(share.nbytes)}"


def _count(values: int) -> str:
    return f"{values} saved value{'' if values == 1 else 's'}"


def _largest(it: Explanation) -> Iterator[str]:
    total = it.saved if it.module is None else it.module.values
    if not total:
        where = "run" if it.module is None else "part"
        yield f"Autograd saves nothing in this {where} beside parameters and buffers."
    elif len(it.values) < total:
        yield f"The largest {len(it.values)} of {_count(total)}:"


def _tail(it: Explanation) -> Iterator[str]:
    if it.values:
        yield f"All choices for one of them: belady explain RUN {it.values[0].value}"


def _origin(story: ValueStory) -> str:
    where = f" in {story.module}" if story.module else ""
    if story.saved_at < 0:
        return f"made by {story.saved_by}{where}" if story.saved_by else "there from the beginning"
    role = "as its input" if story.as_input else "as its output"
    return f"saved by {story.saved_by}{where}, {role}"


def _geometry(story: ValueStory) -> str:
    shape = "x".join(map(str, story.shape)) or "scalar"
    tensor = f"{shape} of {story.dtype}, " if story.dtype else ""
    return f"{tensor}{format_bytes(story.nbytes)} ({story.kind})"


def _lifetime(story: ValueStory) -> str:
    if story.read_at < 0:
        text = f"saved at op {story.saved_at}, never read in backward"
        return f"{text}: let go after {format_seconds(story.seconds)}"
    ops = story.read_at - story.saved_at
    return (
        f"saved at op {story.saved_at}, first read at op {story.read_at}: {ops} ops, "
        f"{format_seconds(story.seconds)} as predicted"
    )


def _decision(story: ValueStory) -> str:
    return f"{story.decision} ({story.reason})" if story.reason else story.decision


def _cost(it: Explanation, weighed: Weighed) -> Iterator[str]:
    them = "it" if len(weighed.values) == 1 else "them"
    if weighed.decision == "keep":
        yield f"Costs nothing: the plan as it is keeps {them}."
        return
    cost, waits = weighed.cost_seconds, weighed.stall_seconds
    rest = f"with {them} kept, the iteration would take {format_seconds(it.planned.seconds - cost)}"
    if cost > 0:
        yield f"Costs {format_seconds(cost)}: {rest}."
    elif cost < 0:
        yield f"Gains {format_seconds(-cost)}: {rest}, for other copies would come later."
    else:
        yield f"Costs no time: the iteration would be no shorter with {them} kept."
    if waits > 0:
        whose = "its" if len(weighed.values) == 1 else "their"
        yield f"Compute waits {format_seconds(waits)} for {whose} copies."
    yield f"Keeping {them} {_budget(weighed.keep_bytes, it.budget_bytes)}."


def _choices(it: Explanation, weighed: Weighed) -> Iterator[str]:
    planned = f"as planned{f': {weighed.decision}' if weighed.decision else ''}"
    rows: list[Sequence[str]] = [
        ("choice", "iteration", "change", "peak", "change", "needs", "fits"),
        (planned, *_row(it.planned, "", ""), "no" if it.problems else "yes"),
    ]
    for choice in weighed.choices:
        if choice.outcome is None:
            rows.append((choice.name, *["-"] * 5, "no"))
        else:
            seconds = _signed(choice.seconds_change, format_seconds(abs(choice.seconds_change)))
            nbytes = _signed(choice.peak_change, format_bytes(abs(choice.peak_change)))
            figures = _row(choice.outcome, seconds, nbytes)
            rows.append((choice.name, *figures, "yes" if choice.legal else "no"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *rest = (cell for cell in row)
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        yield f"  {'  '.join(cells)}"
    for choice in weighed.choices:
        part = (
            f"{choice.values} of {len(weighed.values)} values" if _in_part(weighed, choice) else ""
        )
        said = ", ".join(filter(None, (part, choice.detail)))
        if said:
            yield f"  {choice.name}: {said}"
    for choice in weighed.choices:
        why = "cannot be" if choice.outcome is None else "does not fit"
        yield from (f"  {choice.name} {why}: {problem}" for problem in choice.problems)


def _row(outcome: Outcome, seconds: str, nbytes: str) -> tuple[str, str, str, str, str]:
    return (
        format_seconds(outcome.seconds),
        seconds,
        format_bytes(outcome.peak_bytes),
        nbytes,
        format_bytes(outcome.needed_bytes),
    )


def _signed(change: float, size: str) -> str:
    if not change:
        return "same"
    return f"{'+' if change > 0 else '-'}{size}"


def _next_best(weighed: Weighed) -> str:
    if weighed.next_best < 0:
        return "No other choice is legal within the budget."
    choice = weighed.choices[weighed.next_best]
    faster = ", which is faster than the plan" if choice.seconds_change < 0 else ""
    todo = _to_do(weighed, choice)
    return f"The next best choice is to {todo}{faster}: {_difference(choice)}."


def _in_part(weighed: Weighed, choice: Choice) -> bool:
    """Whether some of the values stay as planned because the choice is none for them."""
    return 0 < choice.values < len(weighed.values)


def _to_do(weighed: Weighed, choice: Choice) -> str:
    verb, *where = choice.name.split(" ", 1)
    them = "it" if len(weighed.values) == 1 else "them"
    if _in_part(weighed, choice):
        them = f"{choice.values} of the {len(weighed.values)} values"
    again = ", at other times" if choice.name == weighed.decision else ""
    return " ".join([verb, them, *where]) + again


def _difference(choice: Choice) -> str:
    change = choice.seconds_change
    time = "the iteration takes no longer"
    if change:
        time = (
            f"the iteration takes {format_seconds(abs(change))} {'more' if change > 0 else 'less'}"
        )
    size = format_bytes(abs(choice.peak_change))
    if not choice.peak_change:
        return f"{time}, at the same peak"
    return f"{time}, its peak is {size} {'higher' if choice.peak_change > 0 else 'lower'}"
