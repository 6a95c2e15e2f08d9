"""What options of several verbs may be: checked before anything is measured."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path


def existing(text: str) -> Path:
    """A file of records that is there."""
    path = Path(text)
    if not path.is_file():
        raise ArgumentTypeError(f"there is no file {path}")
    return path


def writable(text: str) -> Path:
    """A file that can be written, which is tried; it is left as it was."""
    path = Path(text)
    new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ArgumentTypeError(f"{path} cannot be written: {error.strerror}") from error
    if new:
        path.unlink()
    return path


def figure(text: str) -> Path:
    """A figure that can be written."""
    if Path(text).suffix.lower() not in (".svg", ".png"):
        raise ArgumentTypeError(f"{text}: a figure ends in .svg or .png")
    return writable(text)
