"""Pictures go to files whole or not at all."""

from __future__ import annotations

import gzip
import os
import secrets
from contextlib import suppress
from pathlib import Path


def write_whole(content: bytes, path: str | os.PathLike[str]) -> None:
    """Write a file in one step, compressed when its name ends in ``.gz``.

    Whatever happens, it holds the old bytes or the new ones. The same content makes the same
    bytes.

    Raises
    ------
    OSError
        If the file cannot be written; it names ``path``.
    """
    target = Path(path)
    if target.suffix == ".gz":
        content = gzip.compress(content, compresslevel=6, mtime=0)
    part = target.parent / f".belady-{secrets.token_hex(8)}"
    try:
        with part.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except OSError as error:
        # The name of the part file says nothing to whoever asked for ``path``.
        raise OSError(error.errno, error.strerror, str(target)) from error
    finally:
        with suppress(OSError):
            part.unlink()
