"""A plan's program whose forward and backward are one launch each."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from belady.graph import autograd
from belady.graph.contents import Content, Contents
from belady.graph.doors import beneath_functions, fake_value
from belady.graph.fixed import Checked, FixedContents, Kept, Owed, Places, copied, like
from belady.graph.kinds import Force
from belady.graph.launchable import passes, settings, storage_of
from belady.graph.placing import gradients_of
from belady.graph.points import filled
from belady.graph.program import Program
from belady.ir.collector import seldom_collected
from belady.ir.timeline import Measured, TierPeak
from belady.ir.trace import Tier
from belady.memory.capturing import Capturing
from belady.memory.filling import Filling
from belady.memory.fixed import FixedCarrier
from belady.memory.geometry import below_autograd
from belady.memory.thread import in_backward


class Launched:
    """A program as it was captured: what it reads and writes lies where it lay then.

    Inputs that last, or lie still, are read where they are. All others, and the gradients that
    backward is given, are copied to where they were when it was captured, the latter to memory that
    is free until then. Results are copied to memory of their own, as programs keep them longer than
    it takes to the next launch. Gradients are handed out where they lie: only when all of them are
    gone may forward be launched again.

    Parameters
    ----------
    force
        A plan for one call of one graph.
    carrier
        Its copies.
    lasting
        Names (``_cdata``) of the storages that outlive iterations: parameters and buffers.
    args
        Of the call for which it is captured.
    still
        Places of those that do not last and are read where they lie all the same.

    Attributes
    ----------
    launches
        What has captured it.
    """

    def __init__(
        self,
        force: Force,
        launches: Capturing,
        carrier: FixedCarrier,
        lasting: set[int],
        args: Sequence[Any],
        still: Set[int] = frozenset(),
    ) -> None:
        (self._program,) = force.programs
        self.launches, self._carrier = launches, carrier
        forward = force.drawn.parts[0]
        apart = () if force.place is None else gradients_of(forward)
        self._places = Places(apart, carrier.device)
        self._contents = FixedContents(carrier, force.plan.decisions, place=self._places.give)
        self._settings = settings()
        self._owed: weakref.ref[Owed] | None = None
        self._given = [*args]
        passing = [n for n, arg in enumerate(args) if passes(arg, lasting)]
        self._copied, self._still = [n for n in passing if n not in still], sorted(still)
        for number in passing:
            # Of what lies still nobody is to find the bytes taken who puts the next one there.
            own = launches.seen if number in still else copied
            self._given[number] = own(args[number])
        self._read = [n for n, arg in enumerate(args) if storage_of(arg) in lasting] + self._still
        self._addresses = [args[number].data_ptr() for number in self._read]
        self._told = [(n, arg) for n, arg in enumerate(args) if not isinstance(arg, torch.Tensor)]
        self._wanted = [fake_value(node) for node in forward.joint.tangents]
        self._tangents, self._closed = list[torch.Tensor](), False
        self._launch_forward = self._launch_backward = _gone
        self._filling: Filling | None = None
        self._results, self._saved = list[Any](), list[Any]()
        self._checked: list[Checked] = []
        self._gradients: list[Any] = []
        try:
            self._capture()
        except BaseException:
            self._let_go()
            raise

    @property
    def idle(self) -> bool:
        """Whether no backward is owed: nothing but gradients has to stay."""
        return self._owed is None or self._owed() is None

    @property
    def missed(self) -> int:
        """Blocks that did not find the place free where they were packed."""
        return 0 if self._filling is None else len(self._filling.missed)

    def program(self) -> Program:
        """What the next call runs as; until it is over, or thrown away, nothing is given back."""
        owed = [Owed()]
        self._owed = weakref.ref(owed[0])
        places = tuple(range(len(self._checked)))
        return Program(partial(self._forward, owed), self._backward, places)

    def let_go_of(self, gradients: Iterable[torch.Tensor]) -> bool:
        """Copy gradients of parameters that lie where launches write; whether there were any.

        They stay the same objects: a program zeroes them when forward has run, or adds to them.
        Where anybody else has their bytes nothing is copied: those would be others from then on.
        """
        ours: dict[int, list[torch.Tensor]] = {it: [] for it in self._storages}
        for gradient in gradients:
            known = ours.get(storage_of(gradient))
            if known is not None and all(it is not gradient for it in known):
                known.append(gradient)
        held = zip(self._storages, _users(self._storages), self._alone, strict=True)
        if any(len(ours[it]) > 1 or users > alone + len(ours[it]) for it, users, alone in held):
            return False
        for (gradient,) in filter(None, ours.values()):
            gradient.data = copied(gradient.detach())
        return any(ours.values())

    def close(self) -> None:
        """Give back what was captured, at once or when the backward that is still owed has run.

        What is left of earlier iterations, such as a loss, holds on to it.
        """
        self._closed = True
        if self.idle:
            self._let_go()

    def _let_go(self) -> None:
        self._launch_forward = self._launch_backward = _gone
        for held in (self._given, self._tangents, self._results, self._saved, self._gradients):
            held.clear()
        self._places.clear()
        self._carrier.close()

    def takes(self, args: Sequence[Any]) -> bool:
        """Whether a launch now does what the program would do for ``args``."""
        return (
            self.idle
            and [args[number].data_ptr() for number in self._read] == self._addresses
            and all(args[number] == told for number, told in self._told)
            and self._settings == settings()
            and _users(self._storages) == self._alone
        )

    def measured(self, found: Measured) -> Measured:
        """What was measured of launches, with what they hold and move, which nobody sees them do.

        They take nothing from the device's allocator, which counted it when it was captured.
        """
        device = max(found.peak(Tier.DEVICE), self.launches.peak_bytes)
        peaks = TierPeak(Tier.DEVICE, device), TierPeak(Tier.HOST, self._carrier.host_bytes)
        return replace(found, level=0, launched=True, peaks=peaks, moved=self._moved)

    def _capture(self) -> None:
        fresh: list[list[Any]] = []
        outside = {storage_of(it) for it in self._given}

        def forward() -> tuple[list[Any], list[Any], tuple[int, ...]]:
            with _as_a_part():
                # Before all else, so that they do not leave the rest in pieces.
                self._places.take()
            self._filling = self.launches.divide()
            with _as_a_part(), filled(self._program, self._filling) as program:
                made = program.forward([*self._given], self._contents, None)
                self._carrier.join()
                return made

        def backward() -> list[Any]:
            saved = fresh.pop() if fresh else self._saved_again(self._contents)
            with _as_a_part(), filled(self._program, self._filling) as program:
                given = self._given_to_backward()
                gradients = program.backward(saved, given, self._contents, None)
                self._carrier.join()
                return gradients

        self._launch_forward, made = self.launches.capture(forward)
        results, saved, _ = made
        self._results = [self._kept(it, outside) for it in results]
        self._saved = [self._kept(it, outside) for it in saved]
        watched = (saved[place] for place in self._program.checked)
        self._checked = Checked.each(watched, self._given, results)
        fresh.append(saved)
        # Backward is captured as it runs: what it consumes goes, and others get the bytes.
        del made, results, saved
        # Where it runs otherwise: what cuDNN has chosen there, no other thread knows.
        captured = in_backward(self._carrier.device, partial(self.launches.capture, backward))
        self._launch_backward, self._gradients = captured
        tensors = [it for it in self._gradients if isinstance(it, torch.Tensor)]
        self._moved = self._carrier.moved
        self._storages = [storage_of(it) for it in tensors]
        del tensors
        self._alone = _users(self._storages)

    def _given_to_backward(self) -> list[torch.Tensor]:
        """Where backward finds the gradients it is given.

        They are of the pool, beside what forward has saved: when they are consumed others get the
        bytes, and what is launched before backward may have written to them.
        """
        if self._tangents:
            return [*self._tangents]
        given = [like(it, self._carrier.device) for it in self._wanted]
        self._tangents = [self.launches.seen(it) for it in given]
        return given

    def _kept(self, value: Any, outside: set[int]) -> Any:
        """What was saved, without holding bytes of the pool."""
        if isinstance(value, Content):
            return Kept(value, self.launches.seen)
        if not isinstance(value, torch.Tensor) or value.device != self._carrier.device:
            return value
        return value if storage_of(value) in outside else self.launches.seen(value)

    def _saved_again(self, contents: Contents) -> list[Any]:
        """What forward saved, as it was when its launch had ended."""
        return [it.again(contents) if isinstance(it, Kept) else it for it in self._saved]

    def _forward(
        self, owed: list[Owed], args: list[Any], *_: Any
    ) -> tuple[list[Any], list[Any], tuple[int, ...]]:
        if self._copied:
            targets = [self._given[number] for number in self._copied]
            torch._foreach_copy_(targets, [args[number] for number in self._copied])
        owed[0].read = [args[number] for number in self._read]
        owed[0].held = [args[number].detach() for number in self._still]
        self._launch_forward()
        results = [copied(it) if isinstance(it, torch.Tensor) else it for it in self._results]
        checked = [it.among(args, results) for it in self._checked]
        args.clear()
        return results, [*checked, owed.pop()], tuple([it._version for it in checked])

    def _backward(self, saved: list[Any], args: list[Any], *_: Any) -> list[Any]:
        # Until it is launched: bytes that are let go before may be given to another stream.
        owed: Owed = saved.pop()
        saved.clear()
        if self._carrier.host_bytes:
            self._carrier.check_open()
        lies = [it.data_ptr() for it in owed.read]
        as_captured = lies == self._addresses and self._settings == settings()
        if autograd.keeps_graph() or not as_captured:
            # It may come again, and a launch would write to what was saved.
            contents = self._contents.anew()
            return self._program.backward(self._saved_again(contents), args, contents, None)
        if self._tangents:
            self.launches.follow()
            torch._foreach_copy_(self._tangents, args)
        args.clear()
        self._launch_backward()
        # A tensor that stands for two gradients stays one.
        handed = {id(it): it.detach() for it in self._gradients if isinstance(it, torch.Tensor)}
        gradients = [handed.get(id(it)) for it in self._gradients]
        if self._closed:
            # Not before it has run: the allocator would wait for the stream of the capture alone.
            self.launches.wait()
            self._let_go()
            self.launches.forget()
        return gradients


@contextmanager
def _as_a_part() -> Iterator[None]:
    """As forward and backward of a graph run."""
    with below_autograd(), beneath_functions(), seldom_collected():
        yield


def _gone() -> None:
    raise RuntimeError("what was captured has been given back")


def _users(storages: Sequence[int]) -> list[int]:
    count = torch._C._storage_Use_Count
    return [count(it) for it in storages]
