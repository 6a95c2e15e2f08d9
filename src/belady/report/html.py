"""A Run as one page of HTML that needs nothing else: the answer, then pictures and tables."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from belady.ir.run import Run
from belady.report import facts
from belady.report.distance import HASTY, distance
from belady.report.html_axis import COLUMNS, Axis, axis_of, phases
from belady.report.html_lanes import HEIGHT as LANE_HEIGHT
from belady.report.html_lanes import Row, lanes
from belady.report.html_memory import HEIGHT as MEMORY_HEIGHT
from belady.report.html_memory import memory
from belady.report.html_summary import causes, cost, tiles
from belady.report.html_tables import lives, modules
from belady.report.remarks import remarks
from belady.units import format_bytes, format_seconds, printable

_AMOUNT = re.compile(r"(?<=\d) (?=[KMGT]?i?B\b|[mµ]?s\b)")
_TEMPLATES = Path(__file__).parent / "templates"


def page(run: Run) -> str:
    """Write the page; the same run makes the same text.

    Names from the user's model are escaped twice: what is not printable is spelled out, and what
    means something in HTML does not. The page allows no script but its own, and no network.
    """
    axis = axis_of(run)
    script, script_hash = _script()
    context: dict[str, Any] = {
        "run": run,
        "facts": facts,
        "remarks": remarks(run),
        "cost": cost(run),
        "distance": distance(run, longest=HASTY).sentence,
        "tiles": tiles(run),
        "causes": causes(run),
        "axis": axis,
        "columns": COLUMNS,
        "phases": list(phases(run, axis)),
        "memory": memory(run, axis),
        "memory_height": MEMORY_HEIGHT,
        "lanes": _lanes(run, axis),
        "lane_height": LANE_HEIGHT,
        "lives": lives(run, axis),
        "modules": modules(run),
        "script": script,
        "script_hash": script_hash,
    }
    return _environment().get_template("report.html.j2").render(context)


def _lanes(run: Run, axis: Axis) -> list[tuple[str, str, list[Row]]]:
    """Name, what of it is drawn, and rows of each side that has any."""
    about = format_seconds(run.predicted.seconds)
    found = [("Predicted", about, lanes(run, run.predicted, axis))]
    if run.measured is not None:
        name, took = facts.recording(run).lower(), format_seconds(run.measured.recorded_seconds)
        found.append(
            ("Measured", f"{name}, {took}" if name else "", lanes(run, run.measured, axis))
        )
    return [(name, about, rows) for name, about, rows in found if rows]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters |= {"bytes": format_bytes, "seconds": format_seconds, "unbroken": _unbroken}
    return environment


def _unbroken(text: str) -> Markup:
    """Keep numbers and their units on one line."""
    return Markup(_AMOUNT.sub("&nbsp;", str(escape(printable(text)))))


def _shown(item: object) -> object:
    """Spell out what is not printable in every text but our own markup."""
    return printable(item) if isinstance(item, str) and not isinstance(item, Markup) else item


@cache
def _script() -> tuple[Markup, str]:
    """The script of the page, and the name by which the page allows it."""
    text = (_TEMPLATES / "report.js").read_text("utf-8")
    return Markup(text), b64encode(sha256(text.encode()).digest()).decode("ascii")
