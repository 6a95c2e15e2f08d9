"""What a verb writes: refused before any work where it could not be written after it."""

from __future__ import annotations

from pathlib import Path

import typer

from belady.ir.files import require_writable


def require_output(output: Path | None, *inputs: Path | None) -> None:
    """Refuse an output that would take the place of an input, or that cannot be written."""
    if output is None:
        return
    for given in inputs:
        if given is not None and given.exists() and output.exists() and output.samefile(given):
            raise typer.BadParameter(f"{output} is an input too: give the output another name")
    require_writable(output)
