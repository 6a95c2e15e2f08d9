"""Output: documents and text on stdout, notes on stderr. Nothing shown can steer a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from belady.ir.files import dumps
from belady.units import printable


class Notes(Console):
    """Stderr, or what it was; where its reader is gone, rich would end the process."""

    def __init__(self, file: TextIO | None = None) -> None:
        super().__init__(file=file, stderr=True, highlight=False)

    def on_broken_pipe(self) -> None:
        """Say nothing from now on."""
        self.quiet = True


def note(text: str) -> None:
    """Write ``belady: text`` on stderr."""
    Notes().print(Text(f"belady: {printable(text)}"), soft_wrap=True)


def show_line(text: str) -> None:
    """Write one line on stdout."""
    console = Console()
    console.print(_shown(text, console), soft_wrap=True)


def _shown(text: str, console: Console) -> Text:
    """What is safe to show, in letters that the stream has."""
    known = printable(text).replace("µ", "u") if console.options.ascii_only else printable(text)
    return Text(known.encode(console.encoding, "backslashreplace").decode(console.encoding))


def show_document(document: object) -> None:
    """Write a document as JSON on stdout, on one line."""
    sys.stdout.write(dumps(document) + "\n")


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write a table on stdout; the first column is flush left, the others right."""
    console = Console()
    table = Table(title=_shown(title, console), title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_shown(cell, console) for cell in row))
    console.print(table)
