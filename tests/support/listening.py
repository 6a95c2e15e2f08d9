"""What a CPU's allocator hands out and takes back, as a ledger has it of torch's for a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from belady.graph import launching, listening, points, rehearsal
from belady.graph.away import Value
from belady.graph.launched import Launched
from belady.graph.rehearsal import Rehearsal
from belady.memory import filling, marks
from belady.memory.marks import Mark
from belady.simulate.packing import Packing
from belady.simulate.stretch import Event
from tests.support.launches import Rerun

# Of the networks of tests blocks of more bytes are large, and any more may be put elsewhere.
SMALL = 4096


class Notebook:
    """Addresses and bytes of what came, and of what went with no bytes, while it listened."""

    def __init__(self) -> None:
        self.noted: list[tuple[int, int]] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Torch's profiler listens: to one thread, and not beyond the end of a backward."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as listened:
            yield
        results: Any = listened.profiler
        tree = results.kineto_results.experimental_event_tree()
        for event in sorted(_allocations(tree), key=lambda it: it.start_time_ns):
            fields = event.extra_fields
            self.noted.append((fields.ptr, max(0, fields.alloc_size)))

    def numbered(self) -> tuple[list[Event], list[int]]:
        """As `belady.memory.ledger` has it."""
        events, living, addresses = list[Event](), dict[int, int](), list[int]()
        for at, nbytes in self.noted:
            if at in living:
                # Also what went while nobody listened, and whose bytes are another's by now.
                events.append((living.pop(at), 0))
            if nbytes:
                living[at] = len(addresses)
                addresses.append(at)
                events.append((living[at], nbytes))
        return [*events, *((block, 0) for block in living.values())], addresses


class _Ledger:
    """`belady.memory.ledger.Ledger` of a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.addresses: Sequence[int] = ()
        self.book, self.listens = Notebook(), False

    def begin(self) -> None:
        self.book, self.listens = Notebook(), True

    def end(self) -> list[Event]:
        if not self.listens:
            return []
        self.listens = False
        events, self.addresses = self.book.numbered()
        return events

    def drop(self) -> None:
        self.listens = False


class _Marking:
    """`belady.memory.filling.Filling` that only leaves marks where blocks may be taken."""

    missed: Sequence[int] = ()

    def open(self) -> None:
        self.point()

    def point(self) -> None:
        Mark.POINT.leave(torch.device("cpu"))

    def before(self, *values: Any) -> None:
        self.point()

    def made(self, *values: Any) -> None:
        pass

    held = made

    def close(self) -> None:
        pass


def listening_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Packing], Notebook]:
    """Have rehearsals and the first capture noted; the packings, and what the capture took.

    What is captured is given up then, and stands for what `belady.memory.launches` would capture.
    """
    packings, book = list[Packing](), Notebook()
    for module in (marks, rehearsal, filling):
        monkeypatch.setattr(module, "SMALL", SMALL)
    monkeypatch.setattr(filling, "WALL_BYTES", 2 * SMALL)
    # Until nothing is lost, which of these networks is soon.
    monkeypatch.setattr(rehearsal, "_MOST_S", 60.0)
    monkeypatch.setattr(listening, "_STAYS", 0.0)
    monkeypatch.setattr(launching, "packs", lambda device: True)
    # The state of a generator is of the same memory here, too.
    monkeypatch.setattr(points, "draws", lambda plain: False)
    monkeypatch.setattr(Mark, "leave", _leave)
    _listen_to_rehearsals(monkeypatch, packings)

    def capture(self: Launched, plain: Any = Launched._capture) -> None:
        if not book.noted:
            with book.listening():
                plain(self)
        raise RuntimeError("that is all")

    def divide(self: Rerun) -> _Marking:
        Mark.BEGIN.leave(torch.device("cpu"))
        return _Marking()

    def seen(self: Rerun, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        known = storage.data_ptr(), storage.device, storage.nbytes()
        bytes_ = torch._C._construct_storage_from_data_pointer(*known)
        made = torch.empty(0, dtype=tensor.dtype)
        return made.set_(bytes_, tensor.storage_offset(), tensor.shape, tensor.stride())

    monkeypatch.setattr(Launched, "_capture", capture)
    monkeypatch.setattr(Rerun, "divide", divide)
    monkeypatch.setattr(Rerun, "seen", seen)
    monkeypatch.setattr(Rerun, "capture", lambda self, issue: (lambda: None, issue()))
    return packings, book


def _listen_to_rehearsals(monkeypatch: pytest.MonkeyPatch, packings: list[Packing]) -> None:
    backward, listened, packing = Rehearsal._backward, Rehearsal._listened, Rehearsal.packing
    given = list[tuple[int, int]]()

    def noting(self: Rehearsal, run: Any, saved: Any, args: list[torch.Tensor], *rest: Any) -> Any:
        storages = [it.untyped_storage() for it in args]
        given[:] = [(it.data_ptr(), it.nbytes()) for it in storages]
        return backward(self, run, saved, args, *rest)

    @contextmanager
    def profiled(self: Any) -> Iterator[None]:
        # What backward is given has come while nobody listened.
        self._ledger.book.noted += given
        with self._ledger.book.listening(), listened(self):
            yield
        given.clear()

    def packed(self: Rehearsal) -> Packing | None:
        found = packing(self)
        packings.extend([] if found is None else [found])
        return found

    # A copy in host memory is of the same memory here, and would be noted.
    def copy_away(self: Any) -> None:
        if (storage := self.there()) is not None:
            self._elsewhere = ctypes.string_at(storage.data_ptr(), self.nbytes)

    def copy_back(self: Any) -> None:
        if (storage := self.there()) is not None:
            ctypes.memmove(storage.data_ptr(), self._elsewhere, self.nbytes)

    monkeypatch.setattr(rehearsal, "Ledger", _Ledger)
    monkeypatch.setattr(Rehearsal, "_backward", noting)
    monkeypatch.setattr(Rehearsal, "_listened", profiled)
    monkeypatch.setattr(Rehearsal, "packing", packed)
    monkeypatch.setattr(Value, "copy_away", copy_away)
    monkeypatch.setattr(Value, "copy_back", copy_back)


def _leave(mark: Mark, device: torch.device) -> None:
    torch.empty(mark.value, dtype=torch.uint8, device=device)


def _allocations(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event
        yield from _allocations(event.children)
