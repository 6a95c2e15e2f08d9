"""Making a budget of device memory real, and undoing it."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import os
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from belady.memory.workspaces import put_first

_MIB = 2**20
# What torch maps at least, of an expandable segment of large blocks.
PAGE_BYTES = 20 * _MIB
# The same, of small blocks.
SMALL_PAGE_BYTES = 2 * _MIB
# Of a budget, what is not set aside: one page that the cap stays below it, and one for what nobody
# foretells.
SPARE_BYTES = 2 * PAGE_BYTES
# What stays taken behind a hole; smaller blocks come from segments of their own.
WALL_BYTES = 2 * _MIB
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def enforce(device: torch.device, budget_bytes: int) -> Callable[[], None]:
    """Let ``device`` hold no more than ``budget_bytes`` for torch; gives what undoes it.

    CUDA: torch's allocator refuses to reserve more. It is also told to use expandable segments,
    unless the user configured it: a plan takes and gives back buffers of many sizes, and whole
    segments leave up to a fifth of a small budget in pieces that fit nothing.

    CPU: glibc is told to return freed tensors to the system at once. That cannot be undone.
    """
    if device.type == "cpu":
        _return_freed_memory()
        return lambda: None
    torch.cuda.empty_cache()
    cap = _CAPS.setdefault(device, _Cap(device))
    cap.add(budget_bytes)
    return functools.partial(cap.remove, budget_bytes)


def make_room(device: torch.device, total_bytes: int, holes: Sequence[int] = ()) -> None:
    """Let torch's allocator forget the blocks of a plan before, and set aside what this one needs.

    Blocks cut for another plan would fragment this one's memory. Small ones have pages of their
    own, for which there is to be as much room as they had. Nothing happens on a CPU.

    Parameters
    ----------
    holes
        What is set aside is divided into holes of so many bytes, and the rest: for as long as this
        is not called again, and a budget is open.
    """
    if device.type == "cuda":
        tear_down(device)
        put_first(device, torch.cuda.empty_cache)
        stats, of = torch.cuda.memory_stats(device), "reserved_bytes.small_pool"
        set_aside(device, total_bytes - (stats[f"{of}.peak"] - stats[f"{of}.current"]))
        with suppress(torch.OutOfMemoryError):
            _WALLS[device] = walls(device, holes)


def tear_down(device: torch.device) -> None:
    """Let go of what divides the memory that is set aside."""
    _WALLS.pop(device, None)


def walls(device: torch.device, holes: Sequence[int]) -> list[torch.Tensor]:
    """What lies behind holes of so many bytes, in what is free, while it is held."""
    opened, found = list[torch.Tensor](), list[torch.Tensor]()
    for nbytes in holes:
        opened.append(torch.empty(nbytes, dtype=torch.uint8, device=device))
        found.append(torch.empty(WALL_BYTES, dtype=torch.uint8, device=device))
    return found


def set_aside(device: torch.device, total_bytes: int) -> None:
    """Make torch's allocator hold up to ``total_bytes`` in all, whole pages in one piece.

    What it takes bit by bit stays in pieces, and each piece ends at something that lasts.
    """
    room = total_bytes - torch.cuda.memory_reserved(device)
    room -= room % PAGE_BYTES
    if room > 0:
        with suppress(torch.OutOfMemoryError):
            torch.empty(room, dtype=torch.uint8, device=device)


def keep_back(device: torch.device, owner: object, nbytes: int) -> None:
    """Let torch reserve ``nbytes`` less than the budgets: ``owner`` holds them outside of torch.

    0 undoes it. What torch has reserved already is not taken from it, see `make_room`.
    """
    _CAPS.setdefault(device, _Cap(device)).keep_back(id(owner), nbytes)


class _Cap:
    """Budgets that are open on one device: together they are what torch may reserve.

    Less what others hold outside of torch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: list[int] = []
        self._elsewhere: dict[int, int] = {}
        self._before = 1.0
        self._configured = any(os.environ.get(name) for name in _VARIABLES)

    def add(self, budget_bytes: int) -> None:
        if not self._open:
            self._before = torch.cuda.get_per_process_memory_fraction(self._device)
            self._expandable(True)
        self._open.append(budget_bytes)
        self._apply()

    def remove(self, budget_bytes: int) -> None:
        self._open.remove(budget_bytes)
        if self._open:
            self._apply()
        else:
            tear_down(self._device)
            self._expandable(False)
            torch.cuda.set_per_process_memory_fraction(self._before, self._device)

    def keep_back(self, owner: int, nbytes: int) -> None:
        if nbytes:
            self._elsewhere[owner] = nbytes
        else:
            self._elsewhere.pop(owner, None)
        if self._open:
            self._apply()

    def _apply(self) -> None:
        total = torch.cuda.get_device_properties(self._device).total_memory
        wanted = max(0, sum(self._open) - sum(self._elsewhere.values()))
        if not self._configured:
            # The allocator compares before it rounds what it maps up to whole pages.
            wanted = max(wanted - PAGE_BYTES, PAGE_BYTES)
        fraction = min(1.0, wanted / total)
        torch.cuda.set_per_process_memory_fraction(fraction, self._device)

    def _expandable(self, wanted: bool) -> None:
        if not self._configured:
            torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{wanted}")


_CAPS: dict[torch.device, _Cap] = {}
_WALLS: dict[torch.device, list[torch.Tensor]] = {}


@functools.cache
def _return_freed_memory() -> None:
    """Make a budget of RAM real: by default glibc keeps freed tensors below a moving threshold."""
    name = ctypes.util.find_library("c")
    library = ctypes.CDLL(name) if name else None
    if library is not None and hasattr(library, "mallopt"):
        trim_threshold, mmap_threshold = -1, -3
        library.mallopt(mmap_threshold, _MIB)
        library.mallopt(trim_threshold, _MIB)
