"""Reading a page as a browser would, as far as the standard library goes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from xml.etree import ElementTree

from belady.ir.run import Run
from belady.planners import plan as make_plan
from belady.simulate import simulate

BAD = '"onload="alert(1)\'><script>document.title=1</script>&\x1b[2J\u202e\n'
_APART = frozenset({"dd", "dt", "h1", "h2", "li", "p", "td", "th"})
SPELLED = "\\x1b[2J\\u202e\\n"


@dataclass
class Page(HTMLParser):
    """Text, tags with attributes, and drawings of a page."""

    html: str
    text: str = ""
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.html)
        self.text = re.sub(r"\s+", " ", self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.text += " " if tag in _APART else ""

    def handle_data(self, data: str) -> None:
        self.text += data

    @property
    def names(self) -> list[str]:
        return [tag for tag, _ in self.tags]

    @property
    def drawings(self) -> list[ElementTree.Element]:
        """Every drawing, which must be well-formed XML."""
        found, depth, start = [], 0, 0
        for match in re.finditer(r"<svg\b|</svg>", self.html):
            if match.group() == "<svg":
                start = start if depth else match.start()
                depth += 1
            else:
                depth -= 1
                if depth == 0:
                    text = self.html[start : match.end()]
                    found.append(ElementTree.fromstring(text))
        assert depth == 0
        return found

    def drawing(self, label: str) -> ElementTree.Element:
        """The one drawing whose label starts so."""
        (found,) = (d for d in self.drawings if d.get("aria-label", "").startswith(label))
        return found


def misnamed(run: Run) -> Run:
    """The same run with names that want to be markup."""
    ops = tuple(replace(op, name=f"{BAD}{op.name}", module=BAD) for op in run.trace.ops)
    values = tuple(
        replace(value, saves=tuple(replace(save, module=BAD, dtype=BAD) for save in value.saves))
        for value in run.trace.values
    )
    trace = replace(run.trace, ops=ops, values=values, roots=(BAD,))
    hardware = replace(run.hardware, name=BAD, versions=((BAD, BAD),))
    plan = make_plan("floor", trace, hardware, run.plan.budget)
    assignments = tuple(replace(item, reason=BAD) for item in plan.assignments)
    plan = replace(plan, assignments=assignments, numerics=(BAD,))
    predicted = simulate(trace, hardware, plan)
    measured = run.measured and replace(run.measured, defaults=((BAD, 1),))
    return Run(trace, hardware, plan, predicted, measured, (BAD,), ((BAD, BAD),))
