"""An iteration that is listened to before it is captured, in little memory.

Where blocks are packed, a plan for launches leaves the allocator next to nothing, and would run out
of memory where they are not: while it is issued, so that kernels are loaded and it is known which
blocks come and go. So what an op does not read is put to host memory meanwhile, as long as there is
much of it, and comes back before it is read. Results are the same, and it is slow. What is handed
out stays: nobody else would have it come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from belady.graph.points import told_of_points
from belady.graph.program import Program
from belady.memory.geometry import unseen
from belady.memory.ledger import Ledger
from belady.memory.marks import Mark, Notes, lives_of
from belady.simulate.packing import Life, Packing, packed
from belady.simulate.stretch import SMALL

# Seconds for which blocks are packed in other ways.
_MOST_S = 10.0

_Storage = torch.UntypedStorage


class _Value:
    """The bytes of a storage that ops have made, here or elsewhere."""

    def __init__(self, number: int, storage: _Storage) -> None:
        self.number, self.nbytes = number, storage.nbytes()
        self._storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._elsewhere: torch.Tensor | None = None

    def there(self) -> _Storage | None:
        """The storage, unless nobody has it any more."""
        found: _Storage | None = _Storage._new_with_weak_ptr(self._storage.cdata)
        return found

    @property
    def address(self) -> int:
        """Where the bytes are; 0 where nobody has the storage, or it has none."""
        storage = self.there()
        return 0 if storage is None else storage.data_ptr()

    def copy_away(self) -> None:
        """Copy the bytes to host memory."""
        if (storage := self.there()) is not None:
            elsewhere = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
            self._elsewhere = elsewhere.copy_(_bytes_of(storage))

    def copy_back(self) -> None:
        """Copy the bytes to the device again."""
        if (storage := self.there()) is not None and self._elsewhere is not None:
            _bytes_of(storage).copy_(self._elsewhere)
        self._elsewhere = None

    def resize(self, nbytes: int) -> None:
        """Give up the device's bytes, or take others."""
        if (storage := self.there()) is not None:
            storage.resize_(nbytes)


class Rehearsal:
    """Carries a program out once, and notes the lives of its blocks.

    Parameters
    ----------
    most_bytes
        Of what ops have made so much may stay on the device, beside what the next one reads.
    host_bytes
        So much of it may be in host memory.
    then
        To be called when a backward is over that was listened to.
    """

    def __init__(
        self,
        device: torch.device,
        most_bytes: int,
        host_bytes: int,
        then: Callable[[], None],
    ) -> None:
        self._device, self._then = device, then
        self._most, self._host_bytes = most_bytes, host_bytes
        self._ledger, self._notes = Ledger(device), Notes()
        self._points = self._numbers = 0
        # By the name (``_cdata``) of the storage; what was read last is at the end.
        self._here: dict[int, _Value] = {}
        self._away: dict[int, _Value] = {}
        self._constants: set[int] = set()
        self._others: set[int] = set()
        self._managed: set[int] = set()
        self._read: list[int] = []
        self._lives: Sequence[Life] = ()

    def program(self, program: Program) -> Program:
        """What is to run instead."""
        told = program.told(self)
        constants = (it.constants.values() for it in program.codes or ())
        self._constants = {it._cdata for values in constants for it in _storages(values)}
        forward = partial(self._forward, told.forward)
        return replace(told, forward=forward, backward=partial(self._backward, told.backward))

    def close(self) -> None:
        """Listen no more."""
        self._ledger.drop()

    def before(self, *values: Any) -> None:
        """A statement comes, which reads these values: have them here, and not much else."""
        with unseen():
            self._point()
            self._forget()
            read = self._read = [it._cdata for it in _storages(values)]
            back = {it: self._away[it] for it in read if it in self._away}
            # As it is read it is what was read last.
            self._here |= {it: self._here.pop(it) for it in dict.fromkeys(read) if it in self._here}
            self._put_away(set(read), sum(it.nbytes for it in back.values()))
            self._bring(back)

    def made(self, *values: Any) -> None:
        """Ops have made these values."""
        for storage in _storages(values):
            name, here = storage._cdata, storage.device == self._device
            # What shows bytes of something that it reads has made none.
            new = name not in self._here and name not in self._read
            ours = new and here and name not in self._others and storage.resizable()
            if ours and storage.nbytes() > SMALL:
                self._here[name] = _Value(self._numbers, storage)
                self._numbers += 1

    def held(self, *values: Any) -> None:
        """These values are managed from now on, as the plan says."""
        for storage in _storages(values):
            self._here.pop(storage._cdata, None)
            self._managed.add(storage._cdata)

    def _forward(self, run: Callable[..., Any], args: list[Any], *rest: Any) -> Any:
        self._others = self._constants.union(it._cdata for it in _storages(args))
        self._ledger.begin()
        with self._listened():
            results, saved, versions = run(args, *rest)
            self.before(*results)
            # A launch copies results; what backward needs of them stays.
            needed = self._managed.union(it._cdata for it in _storages(saved))
            only = [it for it in _storages(results) if it._cdata not in needed | self._others]
            self._notes.results = [it.data_ptr() for it in only]
        self._hand_out(results)
        return results, saved, versions

    def _backward(
        self, run: Callable[..., Any], saved: list[Any], args: list[Any], *rest: Any
    ) -> Any:
        tensors = [it for it in args if isinstance(it, torch.Tensor)]
        self._notes.given = [(it.untyped_storage().data_ptr(), it.nbytes) for it in tensors]
        self._others |= {it._cdata for it in _storages(args)}
        with self._listened():
            gradients = run(saved, args, *rest)
            self.before(*gradients)
        self._hand_out(gradients)
        listened, events = self._ledger.listens, self._ledger.end()
        if events:
            self._lives = lives_of(events, self._ledger.addresses, self._notes)
        if listened:
            self._then()
        return gradients

    def _hand_out(self, values: Iterable[Any]) -> None:
        """Leave these where they are from now on."""
        for storage in _storages(values):
            self._here.pop(storage._cdata, None)

    def packing(self) -> Packing | None:
        """Of the blocks of a forward and its backward; None where nobody could listen."""
        return packed(self._lives, SMALL, _MOST_S) if self._lives else None

    @contextmanager
    def _listened(self) -> Iterator[None]:
        self._mark(Mark.BEGIN)
        with told_of_points(self._point):
            yield
        self._mark(Mark.END)

    def _point(self) -> None:
        self._points += 1
        self._mark(Mark.POINT)

    def _mark(self, mark: Mark) -> None:
        # Another one may listen, whose marks these would not be.
        if self._ledger.listens:
            with unseen():
                mark.leave(self._device)

    def _forget(self) -> None:
        """Note what is gone."""
        for name, value in [*self._here.items()]:
            if value.there() is None:
                del self._here[name]
        for name, value in [*self._away.items()]:
            if value.there() is None:
                del self._away[name]
                self._notes.gone.append((value.number, self._points - 1))

    def _put_away(self, read: set[int], coming: int) -> None:
        """Put away what was not read for longest, until what is here and is coming is not much."""
        over = sum(it.nbytes for it in self._here.values()) + coming - self._most
        room = self._host_bytes - sum(it.nbytes for it in self._away.values())
        away = dict[int, _Value]()
        for name, value in self._here.items():
            if over <= 0 or value.nbytes > room:
                break
            if name not in read:
                away[name] = value
                over, room = over - value.nbytes, room - value.nbytes
        if not away:
            return
        for value in away.values():
            value.copy_away()
        self._notes.away.append({value.address: value.number for value in away.values()})
        self._moved(Mark.AWAY, away, lambda _: 0)
        for name in away:
            self._away[name] = self._here.pop(name)

    def _bring(self, back: dict[int, _Value]) -> None:
        if back:
            self._moved(Mark.BACK, back, lambda value: value.nbytes)
            self._notes.back.append({value.address: value.number for value in back.values()})
        for name, value in back.items():
            value.copy_back()
            self._here[name] = self._away.pop(name)

    def _moved(self, mark: Mark, values: dict[int, _Value], size: Callable[[_Value], int]) -> None:
        self._mark(mark)
        for value in values.values():
            value.resize(size(value))
        self._mark(Mark.OVER)


def _storages(values: Iterable[Any]) -> Iterator[_Storage]:
    """Of the tensors among values, and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value.untyped_storage()
        elif isinstance(value, (list, tuple)):
            yield from _storages(value)


def _bytes_of(storage: _Storage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
