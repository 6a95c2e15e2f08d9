"""Documents as JSON text and files: strict, versioned, and safe to read from anyone.

A document is one JSON object ``{"belady": "Trace", "version": 1, ...}`` with every field of the
dataclass, no more and no fewer. Reading one builds only the dataclasses named in its type; it
never runs anything.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar

from belady.errors import DocumentError
from belady.ir.codec import Codec, object_codec
from belady.ir.collector import uncollected
from belady.ir.consistency import validate
from belady.ir.scalars import Misfit, unique_keys

__all__ = [
    "dumps",
    "load",
    "loads",
    "require_writable",
    "save",
    "validate",
    "write",
]

LARGEST_BYTES = 2**30
_PIECE_BYTES = 2**20

T = TypeVar("T")


def dumps(document: object) -> str:
    """Write a document as JSON: every field, in a fixed order, without spaces.

    Raises
    ------
    DocumentError
        If `loads` would not take it back: a value of the wrong type or out of range.
    PlanMismatchError
        As `loads`.
    """
    try:
        data = _codec(type(document)).encode(document)
    except Misfit as misfit:
        raise misfit.document_error() from None
    validate(document)
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def loads(cls: type[T], text: str) -> T:
    """Read a document of type ``cls`` from JSON.

    Raises
    ------
    DocumentError
        If the text is anything but such a document; the message starts with the path inside it.
    PlanMismatchError
        If it is a Run whose plan is for another trace.
    """
    if len(text) > LARGEST_BYTES:
        raise _too_large(len(text))
    with uncollected():
        try:
            data = json.loads(text, object_pairs_hook=unique_keys)
        except RecursionError:
            raise DocumentError("document: nested too deeply") from None
        except ValueError as error:
            raise DocumentError(f"document: not JSON: {error}") from error
        try:
            document: T = _codec(cls).decode(data)
        except Misfit as misfit:
            raise misfit.document_error() from None
        validate(document)
    return document


def save(document: object, path: str | os.PathLike[str]) -> None:
    """Write a document to a file, compressed when its name ends in ``.gz``; see `write`.

    Raises
    ------
    DocumentError, PlanMismatchError
        As `dumps`.
    OSError
        If the file cannot be written; it names ``path``.
    """
    write(dumps(document).encode("ascii"), path)


def write(content: bytes, path: str | os.PathLike[str]) -> None:
    """Write a file in one step, compressed when its name ends in ``.gz``.

    Whatever happens, it holds the old bytes or the new ones. The same content makes the same
    bytes. Behind a link it is what the link leads to, and who may read it stays as it was.

    Raises
    ------
    OSError
        If the file cannot be written; it names ``path``.
    """
    target = Path(path)
    if target.suffix == ".gz":
        content = gzip.compress(content, compresslevel=6, mtime=0)
    with _part_of(target) as (part, file):
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, part)
        part.replace(os.path.realpath(target))


def require_writable(path: str | os.PathLike[str]) -> None:
    """Find out whether `write` can write a file, without touching what it holds.

    Raises
    ------
    OSError
        If it cannot; it names ``path``.
    """
    with _part_of(Path(path)):
        pass


@contextmanager
def _part_of(target: Path) -> Iterator[tuple[Path, IO[bytes]]]:
    """Open a file that can take the place of ``target``, and is gone at the end unless it did."""
    part = Path(os.path.realpath(target)).parent / f".belady-{secrets.token_hex(8)}"
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if target.exists() and not target.is_file():
            # A pipe or a device would be replaced by a file.
            raise OSError(errno.EINVAL, "Not a regular file")
        with part.open("xb") as file:
            yield part, file
    except OSError as error:
        # The name of the part file says nothing to whoever asked for ``target``.
        raise OSError(error.errno, error.strerror, str(target)) from error
    finally:
        with suppress(OSError):
            part.unlink()


def load(cls: type[T], path: str | os.PathLike[str]) -> T:
    """Read a document of type ``cls`` from a file, decompressed when its name ends in ``.gz``.

    Raises
    ------
    DocumentError
        As `loads`, or if it is larger than 1 GiB, decompressed.
    PlanMismatchError
        As `loads`.
    OSError
        If the file cannot be read.
    """
    source = Path(path)
    with source.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > LARGEST_BYTES:
            raise _too_large(size)
        content = _decompressed(file) if source.suffix == ".gz" else _bounded(file)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DocumentError(f"document: not UTF-8: {error}") from error
    return loads(cls, text)


def _codec(cls: type) -> Codec:
    return object_codec(cls, ("belady", cls.__name__))


def _bounded(file: IO[bytes]) -> bytes:
    """Read all, but never more than the limit: a file may grow, or be a device."""
    content = bytearray()
    # Piece by piece: asked for all at once, Python would reserve the limit itself.
    while piece := file.read(_PIECE_BYTES):
        content += piece
        if len(content) > LARGEST_BYTES:
            raise _too_large(len(content))
    return bytes(content)


def _decompressed(file: IO[bytes]) -> bytes:
    try:
        with gzip.GzipFile(fileobj=file) as stream:
            return _bounded(stream)  # type: ignore[arg-type]
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DocumentError(f"document: not gzip: {error}") from error


def _too_large(nbytes: int) -> DocumentError:
    return DocumentError(f"document: at least {nbytes} bytes, more than {LARGEST_BYTES}")
