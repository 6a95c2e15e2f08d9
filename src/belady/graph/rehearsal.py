"""An iteration that is listened to before it is captured, in little memory.

Where blocks are packed, a plan for launches leaves the allocator next to nothing, and would run out
of memory where they are not: while it is issued, so that kernels are loaded and it is known which
blocks come and go. So what an op does not read is put to host memory meanwhile, as long as there is
much of it, and comes back before it is read. Results are the same, and it is slow. What is handed
out stays: nobody else would have it come back. Where there is no room all the same, all of it is
put away, and what has failed is tried once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from belady.graph.away import Value, settle
from belady.graph.points import Listener, told_of_points
from belady.graph.program import Program
from belady.memory.geometry import unseen
from belady.memory.ledger import Ledger
from belady.memory.marks import Mark, Notes, lives_of, small_bytes_of
from belady.simulate.coming import Life
from belady.simulate.packing import Packing, packed
from belady.simulate.stretch import SMALL

# Seconds for which blocks are packed in other ways, and of how many blocks each more second is.
_MOST_S, _A_SECOND = 10.0, 500

_Storage = torch.UntypedStorage


class Rehearsal:
    """Carries a program out once, and notes the lives of its blocks.

    Parameters
    ----------
    most_bytes
        Of what ops have made so much may stay on the device, beside what the next one reads.
    host_bytes
        So much of it may be in host memory.
    scarce
        Numbers of the points at which there was no room, under the same plan: there nothing else
        stays from the first. Those of this one are added.
    then
        To be called when a backward is over that was listened to.

    Attributes
    ----------
    flawed
        Whether there was no room at a point: what has failed there has left blocks that no other
        iteration takes.
    """

    def __init__(
        self,
        device: torch.device,
        most_bytes: int,
        host_bytes: int,
        scarce: set[int],
        then: Callable[[], None],
    ) -> None:
        self._device, self._then = device, then
        self._scarce, self.flawed = scarce, False
        cuda = device.type == "cuda"
        generator = torch.cuda.default_generators[device.index] if cuda else torch.default_generator
        self._listener = Listener(self._point, self._starved, generator)
        self._most, self._host_bytes = most_bytes, host_bytes
        self._ledger, self._notes = Ledger(device), Notes()
        self._points = self._numbers = 0
        # By the name (``_cdata``) of the storage; what was read last is at the end.
        self._here: dict[int, Value] = {}
        self._away: dict[int, Value] = {}
        # What is managed stays where it is, as long as there is room.
        self._held: dict[int, Value] = {}
        self._constants: set[int] = set()
        self._others: set[int] = set()
        self._managed: set[int] = set()
        self._read: list[int] = []
        self._lives: Sequence[Life] = ()
        self._small_bytes = 0

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
            read = self._read = [it._cdata for it in _storages(values)]
            self._point()
            self._forget()
            back = {it: self._away[it] for it in read if it in self._away}
            # As it is read it is what was read last.
            self._here |= {it: self._here.pop(it) for it in dict.fromkeys(read) if it in self._here}
            coming = sum(it.nbytes for it in back.values())
            self._put_away(set(read), self._here_bytes + coming - self._most)
            self._listener.patiently(self._bring, back)

    def made(self, *values: Any) -> None:
        """Ops have made these values."""
        for storage in _storages(values):
            name, here = storage._cdata, storage.device == self._device
            # What shows bytes of something that it reads has made none.
            new = name not in self._here and name not in self._read
            ours = new and here and name not in self._others and storage.resizable()
            if ours and storage.nbytes() > SMALL:
                self._here[name] = Value(self._numbers, storage)
                self._numbers += 1

    def held(self, *values: Any) -> None:
        """These values are managed from now on, as the plan says."""
        for storage in _storages(values):
            if (value := self._here.pop(storage._cdata, None)) is not None:
                self._held[storage._cdata] = value
            self._managed.add(storage._cdata)

    def _forward(self, run: Callable[..., Any], args: list[Any], *rest: Any) -> Any:
        self._others = self._constants.union(it._cdata for it in _storages(args))
        self._ledger.begin()
        with self._listened():
            results, saved, versions = run(args, *self._patient(*rest))
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
            gradients = run(saved, args, *self._patient(*rest))
            self.before(*gradients)
        self._hand_out(gradients)
        listened, events = self._ledger.listens, self._ledger.end()
        if events and not self.flawed:
            self._lives = lives_of(events, self._ledger.addresses, self._notes)
            self._small_bytes = small_bytes_of(events)
        if listened:
            self._then()
        return gradients

    def _hand_out(self, values: Iterable[Any]) -> None:
        """Leave these where they are from now on."""
        for storage in _storages(values):
            self._here.pop(storage._cdata, None)
            self._held.pop(storage._cdata, None)

    def packing(self) -> Packing | None:
        """Of the blocks of a forward and its backward; None where nobody could listen."""
        if not self._lives:
            return None
        seconds = _MOST_S + len(self._lives) / _A_SECOND
        return packed(self._lives, SMALL, seconds)._replace(small_bytes=self._small_bytes)

    @contextmanager
    def _listened(self) -> Iterator[None]:
        self._mark(Mark.BEGIN)
        with told_of_points(self._listener):
            yield
        self._mark(Mark.END)

    def _patient(self, contents: Any, *rest: Any) -> tuple[Any, ...]:
        return _Patient(contents, self._listener), *rest

    def _point(self) -> None:
        self._points += 1
        self._mark(Mark.POINT)
        if self._points in self._scarce:
            self._make_room()

    def _starved(self) -> bool:
        self.flawed = True
        self._scarce.add(self._points)
        return self._make_room()

    def _make_room(self) -> bool:
        """Have nothing here but what is read or managed, in one piece; whether any of it moved."""
        with unseen():
            settle(self._device)
            self._forget()
            held = {name: it for name, it in self._held.items() if it.movable}
            stays = [*held, *(it for it in dict.fromkeys(self._read) if it in self._here)]
            self._here = held | self._here
            moved = self._put_away(set(), self._here_bytes)
            torch.cuda.empty_cache()
            self._bring({it: self._away[it] for it in stays if it in self._away})
            for name in held:
                self._here.pop(name, None)
            return moved

    def _mark(self, mark: Mark) -> None:
        # Another one may listen, whose marks these would not be.
        if self._ledger.listens:
            with unseen():
                mark.leave(self._device)

    def _forget(self) -> None:
        """Note what is gone."""
        self._held = {it: of for it, of in self._held.items() if of.there() is not None}
        for name, value in [*self._here.items()]:
            if value.there() is None:
                del self._here[name]
        for name, value in [*self._away.items()]:
            if value.there() is None:
                del self._away[name]
                self._notes.gone.append((value.number, self._points - 1))

    @property
    def _here_bytes(self) -> int:
        return sum(it.nbytes for it in self._here.values())

    def _put_away(self, read: set[int], over: int) -> bool:
        """Put away so much of what is not read, first of all what was not for longest.

        Whether anything was; what a host has no room for stays.
        """
        room = self._host_bytes - sum(it.nbytes for it in self._away.values())
        away = dict[int, Value]()
        for name, value in self._here.items():
            if over <= 0:
                break
            if name not in read and value.nbytes <= room:
                away[name] = value
                over, room = over - value.nbytes, room - value.nbytes
        if not away:
            return False
        for value in away.values():
            value.copy_away()
        self._notes.away.append({value.address: value.number for value in away.values()})
        self._moved(Mark.AWAY, away, lambda _: 0)
        for name in away:
            self._away[name] = self._here.pop(name)
        return True

    def _bring(self, back: dict[int, Value]) -> None:
        if back:
            try:
                self._moved(Mark.BACK, back, lambda value: value.nbytes)
            except torch.OutOfMemoryError:
                for value in back.values():
                    value.resize(0)
                raise
            self._notes.back.append({value.address: value.number for value in back.values()})
        for name, value in back.items():
            value.copy_back()
            self._here[name] = self._away.pop(name)

    def _moved(self, mark: Mark, values: dict[int, Value], size: Callable[[Value], int]) -> None:
        self._mark(mark)
        for value in values.values():
            value.resize(size(value))
        self._mark(Mark.OVER)


class _Patient:
    """Contents of an iteration, whose values come back although there was no room at first."""

    def __init__(self, contents: Any, listener: Listener) -> None:
        self._contents, self._listener = contents, listener

    def __getattr__(self, name: str) -> Any:
        return getattr(self._contents, name)

    def bring(self, value: int) -> None:
        """Have a value on its way back, or decoded."""
        self._listener.patiently(self._contents.bring, value)

    def encode(self, value: int) -> None:
        """Encode a value where it is."""
        self._listener.patiently(self._contents.encode, value)


def _storages(values: Iterable[Any]) -> Iterator[_Storage]:
    """Of the tensors among values, and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value.untyped_storage()
        elif isinstance(value, (list, tuple)):
            yield from _storages(value)
