"""Figures for papers: what a run held, when it worked, and how methods compare.

Colours are those of Okabe and Ito, which the colour-blind can tell apart; hatches, line styles and
markers say the same in grey. The same data gives the same file.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from belady.errors import MissingExtraError
from belady.ir.files import write
from belady.ir.run import Run
from belady.ir.trace import Tier
from belady.report import ink
from belady.report.series import bytes_by_op, dots, envelope, phases, rows
from belady.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Times the fastest, from which on a linear scale would press most methods to the ground.
_WIDE = 4.0


class Kind(StrEnum):
    """Whose a point is; BOUND is what nobody can beat."""

    OURS = "ours"
    PEER = "peer"
    BOUND = "bound"


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: time of an iteration that held ``nbytes``.

    For the bound, the least time of any plan within ``nbytes``, infinite where there is no plan.
    What did not pass the cap that it was given is drawn hollow.
    """

    series: str
    nbytes: int
    seconds: float
    kind: Kind
    passed: bool = True


def frontier(
    points: Iterable[Point], *, columns: int = 1, looks: Mapping[str, int] | None = None
) -> Figure:
    """Time over memory: a line for each method, and the region that nobody can reach.

    A method has a point for each measurement, joined in order of bytes. With less memory no plan
    is faster, so the bound at a budget holds for all below it: it is drawn in steps. Where the
    slowest takes many times as long as the fastest, seconds are on a logarithmic scale.

    Parameters
    ----------
    looks
        Numbers of series whose marker and colour are the same in every figure, from 0, of ours
        and of peers apart. Other series take the numbers that are left.

    Raises
    ------
    ValueError
        If there is no point to draw, or one is not a finite amount of bytes and of seconds.
    MissingExtraError
        If matplotlib is absent.
    """
    series: dict[tuple[Kind, str], list[Point]] = {}
    for point in points:
        finite = point.seconds < math.inf or point.kind is Kind.BOUND
        if point.nbytes < 0 or not point.seconds >= 0 or not finite:
            raise ValueError(f"a point needs finite bytes and seconds of at least 0, not {point}")
        series.setdefault((point.kind, point.series), []).append(point)
    drawn = [p for found in series.values() for p in found if p.seconds < math.inf]
    if not drawn:
        raise ValueError("no point to draw: give at least one with finite seconds")
    scale, unit = ink.unit(max(point.nbytes for point in drawn))
    with _matplotlib():
        figure = _figure(columns, 1.9 + 0.4 * columns)
        axes = figure.subplots()
        top = 1.08 * max(point.seconds for point in drawn) * 1e3 or 1.0
        _draw(axes, series, (scale, top), looks or {})
        axes.set_xlim(left=0)
        least = min(point.seconds for point in drawn) * 1e3
        if 0 < _WIDE * least < top:
            ink.logarithmic(axes, least / 1.5, top)
        else:
            axes.set_ylim(0, top)
        axes.set_xlabel(f"memory held at the peak ({unit})")
        axes.set_ylabel("time of an iteration (ms)")
        ink.legend(figure, *axes.get_legend_handles_labels())
        return figure


def _draw(
    axes: Axes,
    series: Mapping[tuple[Kind, str], list[Point]],
    limits: tuple[int, float],
    looks: Mapping[str, int],
) -> None:
    """Draw every series; ``limits`` are the bytes of a unit and the milliseconds at the top."""
    scale, top = limits
    numbers = _numbers(series, looks)
    for (kind, name), found in series.items():
        found.sort(key=lambda point: (point.nbytes, point.seconds))
        at = [(point.nbytes / scale, min(point.seconds * 1e3, top)) for point in found]
        if kind is Kind.BOUND:
            xs, ys = zip(*at, strict=True)
            ink.forbidden(axes, name, xs, ys)
            continue
        look = ink.look(numbers[kind, name], ours=kind is Kind.OURS)
        ink.line(axes, name, at, look)
        failed = [xy for xy, point in zip(at, found, strict=True) if not point.passed]
        if failed:
            ink.hollow(axes, failed, look)
    if any(not point.passed for found in series.values() for point in found):
        ink.hollow_named(axes, "hollow: cap not passed")


def _numbers(
    series: Iterable[tuple[Kind, str]], looks: Mapping[str, int]
) -> dict[tuple[Kind, str], int]:
    """Number of the look of each series, those of ours and of peers apart."""
    free = {kind: (n for n in count() if n not in looks.values()) for kind in Kind}
    return {
        (kind, name): looks[name] if name in looks else next(free[kind]) for kind, name in series
    }


def memory(run: Run, *, columns: int = 1) -> Figure:
    """Bytes held during each op, in order of issue: predicted, measured, and with all kept.

    Raises
    ------
    MissingExtraError
        If matplotlib is absent.
    """
    held = bytes_by_op(run)
    budget, seen = run.plan.budget.device_bytes, run.measured
    tallest = max((max(found) for found in held.values()), default=0)
    # A budget far above all that is held would press everything else to the ground.
    scale, unit = ink.unit(max(tallest, budget if budget <= 2 * tallest else 0))
    with _matplotlib():
        figure = _figure(columns, 1.65 + 0.25 * columns)
        axes = figure.subplots()
        ink.phase_bands(axes, phases(run.trace))
        for name, found in held.items():
            edges, steps = envelope(found)
            colour, style = ink.CURVES[name]
            heights = [nbytes / scale for nbytes in steps]
            if name == "predicted":
                axes.stairs(heights, edges, fill=True, color=colour, alpha=0.15, linewidth=0)
            axes.stairs(
                heights, edges, baseline=None, color=colour, linestyle=style, label=name, lw=1.1
            )
        if seen is not None and seen.held:
            ink.dots(axes, [(h.boundary, h.nbytes / scale) for h in dots(seen.held)])
        elif seen is not None and seen.peak(Tier.DEVICE):
            peak = seen.peak(Tier.DEVICE) / scale
            axes.axhline(peak, color=ink.VERMILLION, ls=(0, (1, 2)), label="measured peak", lw=1.3)
        if budget <= 2 * tallest:
            axes.axhline(budget / scale, color=ink.BLACK, lw=0.9, label="budget")
        axes.set_xlim(0, max(1, len(run.trace.ops)))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("op, in order of issue")
        axes.set_ylabel(f"bytes held ({unit})")
        ink.legend(figure, *axes.get_legend_handles_labels())
        return figure


def timeline(run: Run, *, columns: int = 1) -> Figure:
    """What every lane did when: predicted and, where every event was recorded, measured.

    Raises
    ------
    MissingExtraError
        If matplotlib is absent.
    """
    predicted, seen = run.predicted, run.measured
    drawn = [(f"predicted: {format_seconds(predicted.seconds)}", rows(run, predicted))]
    if seen is not None and seen.spans:
        # Of the iteration that is drawn; the median of those that were verified is another.
        took = f": {format_seconds(seen.recorded_seconds)}" if seen.recorded else ""
        drawn.append((f"measured{took}", rows(run, seen)))
    heights = [max(1, len(found)) for _, found in drawn]
    with _matplotlib():
        figure = _figure(columns, 0.6 + 0.19 * sum(heights) + 0.2 * len(drawn))
        panels = figure.subplots(len(drawn), sharex=True, squeeze=False, height_ratios=heights)
        for axes, (title, found) in zip(panels[:, 0], drawn, strict=True):
            ink.lanes(axes, found)
            axes.set_xmargin(0.01)
            axes.set_title(title, loc="left", pad=2)
        panels[-1, 0].set_xlim(left=0)
        panels[-1, 0].set_xlabel("time (ms)")
        shown = {bar.kind for _, found in drawn for bars in found.values() for bar in bars}
        names = [name for name in ink.BARS if name in shown]
        handles = [panels[0, 0].bar(0, 0, label=name, **ink.bar(name)) for name in names]
        ink.legend(figure, handles, names)
        return figure


def save_figure(
    figure: Figure, path: str | os.PathLike[str], *, description: str | None = None
) -> None:
    """Write a figure as SVG or PNG, by the ending of ``path``; text in SVG stays text.

    Parameters
    ----------
    description
        What the file says of itself, unseen: the points that are drawn, say.

    Raises
    ------
    ValueError
        If the name ends in neither ``.svg`` nor ``.png``.
    OSError
        If the file cannot be written.
    """
    ending = Path(path).suffix.lower()
    if ending not in (".svg", ".png"):
        raise ValueError(f"{path}: a figure ends in .svg or .png")
    # Neither the date nor the version of matplotlib: a figure that is committed does not churn.
    metadata: dict[str, str | None]
    metadata = {"Date": None, "Creator": None} if ending == ".svg" else {"Software": None}
    if description is not None:
        metadata["Description"] = description
    content = io.BytesIO()
    with _matplotlib():
        figure.savefig(content, format=ending[1:], metadata=metadata)
    write(content.getvalue(), path)


@contextmanager
def _matplotlib() -> Iterator[None]:
    """Our style, for as long as something is drawn or written."""
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise MissingExtraError(
            "figures need matplotlib: install it with `pip install 'belady[plot]'`"
        ) from error
    with rc_context(ink.STYLE):
        yield


def _figure(columns: int, height: float) -> Figure:
    """An empty figure, ``height`` inches high without a legend; no window, whatever the backend."""
    from matplotlib.figure import Figure

    if columns not in ink.WIDTHS:
        raise ValueError(f"columns={columns!r}: a figure is 1 or 2 columns wide")
    return Figure(figsize=(ink.WIDTHS[columns], height))
