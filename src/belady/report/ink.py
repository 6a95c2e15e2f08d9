"""How figures look: sizes, colours, and the marks that say the same in grey.

Draws on axes that are given; only `belady.report.plots` imports matplotlib. The colours are those
of Okabe and Ito, which the colour-blind can tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from belady.ir.trace import Phase
from belady.report.series import COPY, ISSUE, STALL, Bar
from belady.units import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches; by columns of a page.
WIDTHS = {1: 3.4, 2: 7.0}
# A line of a legend, by its size of letters and the space between two.
_LINE_INCHES = 0.135

BLACK, _GREY = "#000000", "#999999"
_ORANGE, _SKY, _GREEN = "#E69F00", "#56B4E9", "#009E73"
_YELLOW, _BLUE, VERMILLION, _PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"

# Keys are names of matplotlib, which its types list one by one.
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 7,
    "axes.titlesize": 7,
    "axes.labelsize": 7,
    "legend.fontsize": 6.5,
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.1,
    "hatch.linewidth": 0.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "savefig.dpi": 300,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "belady",
    # A dollar sign in a name is a dollar sign.
    "text.parse_math": False,
}
# Face, hatch.
BARS = {
    Phase.FORWARD.value: (_SKY, ""),
    Phase.LOSS.value: (_YELLOW, "...."),
    Phase.BACKWARD.value: (_BLUE, ""),
    Phase.OPTIMIZER.value: (_GREEN, "----"),
    COPY: (_ORANGE, "////"),
    STALL: ("#DDDDDD", "xxxxxx"),
    ISSUE: (_GREY, ""),
}
# Colour, line style.
CURVES: dict[str, tuple[str, Any]] = {
    "everything kept": (_GREY, (0, (4, 1.5))),
    "predicted": (_BLUE, "-"),
    "in host memory": (_GREEN, (0, (1, 1))),
    "on disk": (_PURPLE, (0, (5, 1.2, 1, 1.2))),
}
# Of ours and of peers, so that the first few of both differ.
_COLOURS = {
    True: (_BLUE, VERMILLION, _SKY, _ORANGE, _GREEN, _PURPLE, BLACK),
    False: (BLACK, _GREEN, _PURPLE, _ORANGE, _SKY, VERMILLION, _BLUE),
}
_MARKERS = "os^Dv*PpX<>hd"
_WHITE = "#FFFFFF"
# Parts of a marker that are filled, of ours and of peers; none is left for what `hollow` draws.
_FILLS = {True: ("full", "top"), False: ("left", "bottom", "right")}
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def unit(nbytes: int) -> tuple[int, str]:
    """Bytes in the unit for an axis that reaches to ``nbytes``, and its name."""
    return next(((size, name) for size, name in _UNITS if nbytes >= size), _UNITS[-1])


def bar(kind: str) -> dict[str, Any]:
    """Face and hatch of a bar; an edge would make many thin bars black."""
    face, hatch = BARS[kind]
    return {"facecolor": face, "edgecolor": BLACK, "hatch": hatch, "linewidth": 0}


def lanes(axes: Axes, rows: Mapping[str, Sequence[Bar]]) -> None:
    """Draw the bars of each lane on a line of its own, the first on top."""
    for line, bars in enumerate(rows.values()):
        for kind in BARS:
            spans = [
                (bar.start_s * 1e3, (bar.end_s - bar.start_s) * 1e3)
                for bar in bars
                if bar.kind == kind
            ]
            if spans:
                axes.broken_barh(spans, (line - 0.36, 0.72), **bar(kind))
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def phase_bands(axes: Axes, phases: Sequence[tuple[str, int, int]]) -> None:
    """Shade every second phase, and name those that have room for their name."""
    whole = max((end for _, _, end in phases), default=0)
    for index, (name, start, end) in enumerate(phases):
        if index % 2:
            axes.axvspan(start, end, color=_GREY, alpha=0.13, linewidth=0)
        if end - start >= 0.12 * whole:
            middle, where = ((start + end) / 2, 1.0), ("data", "axes fraction")
            axes.annotate(
                name, middle, xycoords=where, ha="center", va="bottom", color="#555555", fontsize=6
            )


def look(number: int, *, ours: bool) -> dict[str, Any]:
    """How a method is drawn: marker and fill tell all apart without colour, for a few dozen.

    Ours is filled and solid, a peer half filled and dashed.
    """
    fills, turn = _FILLS[ours], number // len(_MARKERS)
    return {
        "color": _COLOURS[ours][number % len(_COLOURS[ours])],
        "marker": _MARKERS[number % len(_MARKERS)],
        "fillstyle": fills[turn % len(fills)],
        "markerfacecoloralt": _WHITE,
        "linestyle": "-" if ours else (0, (3, 1.5)),
        # What is half open hides less of what is filled.
        "zorder": 3 if ours else 3.5,
    }


def line(
    axes: Axes, name: str, points: Sequence[tuple[float, float]], drawn: dict[str, Any]
) -> None:
    """Draw one method with its `look`; one point has no line."""
    xs, ys = zip(*points, strict=True)
    alone = {"linestyle": ""} if len(points) == 1 else {}
    axes.plot(xs, ys, label=printable(name), ms=4.2, mew=0.8, **drawn | alone)


def hollow(axes: Axes, points: Sequence[tuple[float, float]], drawn: dict[str, Any]) -> None:
    """Empty the markers of points that a `line` has drawn."""
    xs, ys = zip(*points, strict=True)
    empty = {"linestyle": "", "fillstyle": "full", "markerfacecolor": _WHITE}
    axes.plot(xs, ys, ms=4.2, mew=0.8, **drawn | empty)


def hollow_named(axes: Axes, name: str) -> None:
    """Say in the legend what is `hollow`."""
    axes.plot([], [], "o", label=name, ms=4.2, mew=0.8, mfc=_WHITE, mec=_GREY)


def dots(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Draw what was measured; open, so that what was predicted shows through."""
    style: dict[str, Any] = {"ms": 2.4, "mew": 0.5, "mfc": _WHITE, "mec": VERMILLION}
    xs, ys = zip(*points, strict=True)
    axes.plot(xs, ys, "o", label="measured", **style)


def forbidden(axes: Axes, name: str, xs: Sequence[float], ys: Sequence[float]) -> None:
    """Hatch what lies below a bound; between two budgets that of the larger one holds."""
    edges, heights = [0.0, *xs], [*ys]
    face: dict[str, Any] = {"facecolor": "#EEEEEE", "edgecolor": "#777777", "hatch": "////"}
    axes.stairs(heights, edges, fill=True, linewidth=0, label=printable(name), zorder=1, **face)
    axes.stairs(heights, edges, baseline=None, color=BLACK, linewidth=0.9, zorder=1.5)


def logarithmic(axes: Axes, bottom: float, top: float) -> None:
    """Make the upright scale logarithmic, with plain numbers on it."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axes.set_yscale("log", nonpositive="clip")
    axes.set_ylim(bottom, top)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())


def legend(figure: Figure, handles: Sequence[Any], names: Sequence[str]) -> None:
    """Name what is drawn, above the axes, where it hides nothing, in as many columns as fit.

    The figure becomes higher by as much, so that the axes stay as they are.
    """
    fitting = [
        columns
        for columns in range(1, len(names) + 1)
        if _legend_inches(names, columns) <= figure.get_figwidth()
    ]
    if names:
        lines = -(-len(names) // max(fitting, default=1))
        even = -(-len(names) // lines)
        figure.legend(handles, names, loc="outside upper center", ncols=even)
        figure.set_figheight(figure.get_figheight() + lines * _LINE_INCHES)


def _legend_inches(names: Sequence[str], columns: int) -> float:
    """Width of a legend, which is filled column by column; a little more than it needs."""
    lines = -(-len(names) // columns)
    widest = [max(map(len, names[at : at + lines])) for at in range(0, len(names), lines)]
    return sum(0.058 * letters + 0.46 for letters in widest)
