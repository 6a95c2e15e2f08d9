"""``belady explain``: why a value or a module went where it went, and what else could be."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from belady.cli.inputs import RunArgument, read
from belady.cli.options import JsonOption
from belady.cli.show import note, show_document, show_line
from belady.ir.collector import uncollected
from belady.ir.run import Run

_SPEAK_AFTER_S = 3.0


class _Patience:
    """Says what is being worked out, but only to somebody who has been waiting."""

    def __init__(self) -> None:
        self._spoke = time.monotonic()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now - self._spoke >= _SPEAK_AFTER_S:
            note(f"simulating the choices for {text}")
            self._spoke = now


def explain(
    run: RunArgument,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[WHAT]",
            help="A value by its number, or a module by its path or a pattern such as 'layer1.*'. "
            "Default: the ten largest saved values.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say why WHAT went where it went in RUN, what that costs, and what the next best choice is."""
    from belady import explain as explaining

    with uncollected():
        document = read(Run, run)
        try:
            explanation = explaining.explain(document, what, _Patience())
        except explaining.UnknownSubjectError as error:
            raise typer.BadParameter(str(error)) from error
    if json:
        show_document(explanation)
        return
    for line in explaining.describe(explanation).splitlines():
        show_line(line)
