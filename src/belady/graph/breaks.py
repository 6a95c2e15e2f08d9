"""What Dynamo did not capture, and where in the user's code; its names checked as in `doors`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import torch
from torch._dynamo.output_graph import GraphCompileReason
from torch._dynamo.utils import (
    CompilationMetrics,
    counters,
    get_compilation_metrics,
    graph_break_reasons,
)

# Nobody looks there for what to change.
_OURS = tuple(f"{Path(file).parent}/" for file in (torch.__file__, __file__))
# What Dynamo says of a branch, in its other list.
_BRANCH, _SAID_OF_BRANCH = "generic_jump", "Data-dependent branching"


@contextmanager
def breaks(note: Callable[[list[str]], None]) -> Iterator[None]:
    """Tell ``note`` why calls in the block were not captured as a whole, where they were not.

    Dynamo counts its reasons for the whole process, but only where it captures anew.
    """
    before, located, known = _counted(), len(graph_break_reasons), get_compilation_metrics()
    try:
        yield
    finally:
        more = _counted() - before
        if more:
            failed = [it for it in get_compilation_metrics() if not _among(it, known)]
            note(_sentences(more, graph_break_reasons[located:], failed))


def why_not(error: BaseException) -> str:
    """What an error of Dynamo's says, and where; of a backend's, what that one raised."""
    inner = getattr(error, "inner_exception", None)
    said = str(error) if inner is None else f"{type(inner).__name__}: {inner}"
    return _at(_first_line(said), getattr(error, "real_stack", None) or ())


def _counted() -> Counter[str]:
    return Counter(counters["graph_break"]) + Counter(counters["unimplemented"])


def _among(metrics: CompilationMetrics, known: Sequence[CompilationMetrics]) -> bool:
    return any(metrics is it for it in known)


def _sentences(
    counted: Counter[str],
    broken: Sequence[GraphCompileReason],
    failed: Sequence[CompilationMetrics],
) -> list[str]:
    """Each reason with its place: where a frame went on behind a break, or was given up whole."""
    found: dict[str, None] = {}
    said = set()
    for reason in broken:
        if reason.graph_break:
            what = _first_line(reason.reason)
            what = _SAID_OF_BRANCH if what.startswith(_BRANCH) else what
            said.add(what)
            found[_at(what, reason.user_stack)] = None
    for metrics in failed:
        if metrics.fail_reason is not None:
            what = _first_line(metrics.fail_reason)
            said.add(what)
            found[_at(what, _frames(metrics))] = None
    # Of what was counted alone (a limit of Dynamo's, say) it knows no place.
    return [*found, *(it for it in dict.fromkeys(map(_first_line, counted)) if it not in said)]


def _frames(metrics: CompilationMetrics) -> list[FrameSummary]:
    """The frame that was captured, by where it begins, and the innermost one inside of it."""
    places: list[tuple[Any, Any]] = [
        (metrics.co_filename, metrics.co_firstlineno),
        (metrics.fail_user_frame_filename, metrics.fail_user_frame_lineno),
    ]
    return [FrameSummary(file, line, "", lookup_line=False) for file, line in places if file]


def _at(what: str, frames: Sequence[FrameSummary]) -> str:
    """``what`` with the innermost place in the user's code, or in torch's where there is none."""
    theirs = [it for it in frames if not it.filename.startswith(_OURS)]
    others = [it for it in frames if not it.filename.startswith(_OURS[1])]
    if not others:
        return what
    innermost = (theirs or others)[-1]
    return f"{what}, at {innermost.filename}:{innermost.lineno}"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
