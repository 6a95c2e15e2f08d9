"""Output: documents and text on stdout, notes on stderr. Nothing shown can steer a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from belady.ir.files import dumps
from belady.units import printable


def note(text: str) -> None:
    """Write ``belady: text`` on stderr."""
    Console(stderr=True).print(Text(f"belady: {printable(text)}"), soft_wrap=True)


def show_line(text: str) -> None:
    """Write one line on stdout."""
    Console().print(Text(printable(text)), soft_wrap=True)


def show_document(document: object) -> None:
    """Write a document as JSON on stdout, on one line."""
    sys.stdout.write(dumps(document) + "\n")


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write a table on stdout; the first column is flush left, the others right."""
    table = Table(title=Text(printable(title)), title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console().print(table)
