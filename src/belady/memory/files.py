"""One private file for spilled bytes, reachable by this process alone.

The file and its folder are unlinked as soon as they are open, so nothing stays on disk after
the process, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from belady.errors import SpillError, TierFullError
from belady.memory.extents import PAGE, round_up

Bytes = npt.NDArray[np.uint8]
_T = TypeVar("_T")

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM})
_RAM_BACKED = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_MOST_RETRIES = 100
_RETRY_SECONDS = 0.001


class Files:
    """The calls of the operating system: the seam that tests replace to inject faults."""

    def mkdtemp(self, parent: str) -> str:
        """Make a new folder of mode 0700."""
        return tempfile.mkdtemp(prefix="belady-", dir=parent)

    def open(self, path: str, flags: int) -> int:
        """Open ``path`` with mode 0600."""
        return os.open(path, flags, 0o600)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def unlink(self, path: str) -> None:
        """Remove a file's name."""
        os.unlink(path)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Make the file system set bytes aside, so that later writes cannot run out."""
        os.posix_fallocate(fd, offset, nbytes)

    def pwrite(self, fd: int, data: Bytes, offset: int) -> int:
        """Write some of ``data``; returns the number of bytes written."""
        return os.pwrite(fd, data.data, offset)

    def pread(self, fd: int, into: Bytes, offset: int) -> int:
        """Read into some of ``into``; returns the number of bytes read."""
        return os.preadv(fd, [into.data], offset)

    def free_bytes(self, fd: int) -> int:
        """Bytes that the file system of ``fd`` has left for this user."""
        status = os.fstatvfs(fd)
        return status.f_bavail * status.f_frsize

    def file_system(self, path: str) -> str:
        """Type of the file system that holds ``path``, or "" when it is not known."""
        device = os.stat(path).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        try:
            with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as table:
                for line in table:
                    fields = line.split()
                    if fields[2] == wanted:
                        return fields[fields.index("-") + 1]
        except OSError:
            pass  # no /proc: nothing is known
        return ""


def check_folder(directory: str | None, files: Files, allow_ram: bool) -> str:
    """Resolve the spill folder and check that it is one.

    Raises
    ------
    SpillError
        If it is missing, not a folder, or backed by memory.
    """
    given = tempfile.gettempdir() if directory is None else os.fspath(directory)
    try:
        path = os.path.realpath(given, strict=True)
        is_folder = os.path.isdir(path)
        kind = files.file_system(path)
    except (OSError, ValueError) as error:
        raise SpillError(f"spill folder {given!r} cannot be used: {error}") from error
    if not is_folder:
        raise SpillError(f"spill folder {given!r} is not a folder")
    if kind in _RAM_BACKED and not allow_ram:
        raise SpillError(
            f"spill folder {given!r} lies in memory ({kind}): spilling there frees nothing. "
            f"Give spill_dir= a folder on a disk"
        )
    return path


class SpillFile:
    """Positional reads and writes of an unlinked file; whole pages are set aside first.

    Reads and writes go past the page cache (O_DIRECT) where the file system allows it;
    ``direct`` tells. Thread-safe.

    Raises
    ------
    SpillError
        If the folder or the file cannot be made.
    """

    def __init__(self, directory: str | None, files: Files, allow_ram: bool = False) -> None:
        self.directory = check_folder(directory, files, allow_ram)
        self._files = files
        self._bounce = threading.local()
        self._fds = _open_unlinked(self.directory, files)
        self.direct = len(self._fds) == 2

    def grow(self, start: int, nbytes: int) -> None:
        """Set ``nbytes`` bytes aside at ``start``.

        Raises
        ------
        TierFullError
            If the file system has no room, or the file may not be so long.
        SpillError
            If it fails otherwise.
        """
        try:
            _retry(lambda: self._files.fallocate(self._fds[0], start, nbytes))
        except OSError as error:
            if error.errno not in _FULL:
                raise SpillError(
                    f"{nbytes} bytes cannot be set aside in {self.directory!r}: {error}"
                ) from error
            raise TierFullError(
                f"{nbytes} bytes are needed for spilling in {self.directory!r}, where "
                f"{self._free_bytes()} bytes are free: {error.strerror}"
            ) from error

    def write(self, offset: int, data: Bytes) -> None:
        """Write all of ``data`` at ``offset``, a multiple of the page size.

        Raises
        ------
        OSError
            As the operating system says.
        """
        if self.direct and not _aligned(data):
            padded = self._bounce_buffer(data.size)
            np.copyto(padded[: data.size], data)
            data = padded
        done = 0
        while done < data.size:
            done += self._step(self._files.pwrite, data[done:], offset + done)

    def read(self, offset: int, into: Bytes) -> None:
        """Read all of ``into`` from ``offset``, a multiple of the page size.

        Raises
        ------
        OSError
            As the operating system says; EIO when the file is too short.
        """
        target = into
        if self.direct and not _aligned(into):
            target = self._bounce_buffer(into.size)
        done = 0
        # The file ends on a page, so a padded read is never cut short by its padding.
        while done < target.size:
            done += self._step(self._files.pread, target[done:], offset + done)
        if target is not into:
            np.copyto(into, target[: into.size])

    def close(self) -> None:
        """Close the file, and thereby give its space back. Idempotent."""
        while self._fds:
            # The bytes are not wanted any more, and Linux closes in any case.
            with contextlib.suppress(OSError):
                self._files.close(self._fds.pop())

    def _step(self, call: Callable[[int, Bytes, int], int], data: Bytes, offset: int) -> int:
        direct = self.direct and _aligned(data) and offset % PAGE == 0
        try:
            done = _retry(lambda: call(self._fds[1 if direct else 0], data, offset))
        except OSError as error:
            if direct and error.errno == errno.EINVAL:
                self.direct = False
                return 0
            raise
        if done <= 0:
            raise OSError(errno.EIO, f"the file ends or is full at offset {offset}")
        return done

    def _bounce_buffer(self, nbytes: int) -> Bytes:
        """Page-aligned scratch bytes of the calling thread: at least ``nbytes``, whole pages."""
        size = round_up(nbytes)
        buffer: Bytes | None = getattr(self._bounce, "buffer", None)
        if buffer is None or buffer.size < size:
            buffer = self._bounce.buffer = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
        return buffer[:size]

    def _free_bytes(self) -> int:
        try:
            return self._files.free_bytes(self._fds[0])
        except OSError:
            return 0


def _aligned(data: Bytes) -> bool:
    return data.ctypes.data % PAGE == 0 and data.size % PAGE == 0


def _retry(call: Callable[[], _T]) -> _T:
    """Call again when a signal or a busy queue interrupts, but not for ever."""
    for _ in range(_MOST_RETRIES):
        try:
            return call()
        except (InterruptedError, BlockingIOError):
            time.sleep(_RETRY_SECONDS)
    return call()


def _open_unlinked(directory: str, files: Files) -> list[int]:
    """Open a new file twice, buffered and (where possible) direct, and remove its name."""
    fds: list[int] = []
    folder = path = None
    try:
        folder = files.mkdtemp(directory)
        path = os.path.join(folder, "spill")
        common = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        fds.append(files.open(path, common | os.O_CREAT | os.O_EXCL))
        try:
            fds.append(files.open(path, common | os.O_DIRECT))
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
        files.unlink(path)
        files.rmdir(folder)
    except OSError as error:
        _discard(files, fds, folder, path)
        raise SpillError(f"no spill file can be made in {directory!r}: {error}") from error
    return fds


def _discard(files: Files, fds: list[int], folder: str | None, path: str | None) -> None:
    """Undo what `_open_unlinked` has done so far, as far as that goes."""
    undo: list[Callable[[], None]] = [partial(files.close, fd) for fd in fds]
    if path is not None:
        undo.append(lambda: files.unlink(path))
    if folder is not None:
        undo.append(lambda: files.rmdir(folder))
    for step in undo:
        # The first error, which led here, is the one to report.
        with contextlib.suppress(OSError):
            step()
