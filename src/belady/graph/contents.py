"""The bytes of one saved storage while a graph's state holds them, wherever they are."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import ParamSpec, TypeVar, cast

import torch

from belady.ir.plan import Decision, Encode, Offload
from belady.memory.contents import Moved, Packed
from belady.memory.geometry import Geometry
from belady.memory.sending import Sender
from belady.memory.witness import demand_unchanged, witness

P = ParamSpec("P")
T = TypeVar("T")

# Gives a gradient the memory that it shall have: itself, or a copy.
Place = Callable[[torch.Tensor], torch.Tensor]


class Content:
    """Bytes that leave the device, or are encoded there, and come back: `Moved` or `Packed`.

    Parameters
    ----------
    tensor
        A saved tensor; the whole of its storage is managed.
    label
        What records call the bytes: the number of the value in the trace.
    guarded
        Whether others may write to the tensor, so that a later write must be noticed.

    Attributes
    ----------
    bytes
        Where they are.
    geometry
        How the tensor lies on them, for what is to be encoded.
    label
        The number of the value.
    """

    geometry: Geometry

    def __init__(self, tensor: torch.Tensor, carrier: Sender, label: int, *, guarded: bool) -> None:
        self.bytes: Moved | Packed
        self.bytes = moved = Moved(tensor, 0, tensor.untyped_storage().nbytes(), carrier)
        self.label = moved.label = label
        self._shape = tensor.shape
        self._shadow = witness(tensor) if guarded else None
        self._version = 0 if self._shadow is None else self._shadow._version

    def encode(self, codec: str) -> None:
        """Replace the original by an encoding."""
        if isinstance(self.bytes, Moved) and self.bytes.source is not None:
            packed = Packed.of(self.geometry.on(self.bytes.source), codec)
            self.bytes = packed or self.bytes

    def take(self) -> torch.Tensor:
        """Give the bytes, making the reader's stream wait for the copy-in, and hold them no more.

        Whoever asks again gets others, made from the copy.

        Raises
        ------
        StaleValueError
            If the original was changed in place after it had been saved.
        """
        if self._shadow is not None:
            demand_unchanged(self._shadow, self._version, self._shape)
        content = self.bytes.take()
        self.bytes.let_go()
        return content


class Contents:
    """The contents of one iteration, by value: what generated code calls.

    Only weakly held here, since a value lives as long as the state that holds it: copies of a
    graph that was thrown away are not made. ``landing`` is told of device bytes taken, and
    ``passed`` of boundaries at which something is done; ``place`` gives a gradient its place.

    Attributes
    ----------
    host_seconds
        What issuing copies and encodings took the host so far; not where it waits for one. 0 where
        nobody counts it.
    encoding_seconds
        Of these, encodings.
    """

    host_seconds = encoding_seconds = 0.0

    def __init__(
        self,
        carrier: Sender,
        decisions: Mapping[int, Decision],
        landing: Callable[[tuple[torch.Tensor | None, ...]], None] | None = None,
        passed: Callable[[int], None] = lambda boundary: None,
        place: Place | None = None,
    ) -> None:
        self._carrier = carrier
        self._decisions = decisions
        self._landing = landing
        self.passed = passed
        self.place: Place = place or (lambda gradient: gradient)
        self._live: dict[int, weakref.ref[Content]] = {}

    def hold(self, value: int, tensor: torch.Tensor, guarded: bool) -> Content:
        """Begin to manage the storage of ``tensor``, or go on, where another call began.

        What turns out to be on another device than it was traced on stays where it is.
        """
        known = self._find(value)
        if known is not None and known.bytes.identity.cdata == tensor.untyped_storage()._cdata:
            return known
        content = Content(tensor, self._carrier, value, guarded=guarded)
        if isinstance(self._decisions[value], Encode):
            content.geometry = Geometry.of(tensor)
        if tensor.device == self._carrier.device:
            self._live[value] = weakref.ref(content)
        return content

    def anew(self) -> Contents:
        """Contents of another iteration under the same plan."""
        return type(self)(self._carrier, self._decisions, place=self.place)

    def go_on(self, content: Content) -> None:
        """Manage what another iteration left."""
        self._live[content.label] = weakref.ref(content)

    def send(self, value: int) -> None:
        """Issue a copy-out."""
        content, decision = self._find(value), self._decisions[value]
        if content is not None and isinstance(content.bytes, Moved):
            assert isinstance(decision, Offload)
            content.bytes.send(decision.tier)

    def free(self, value: int) -> None:
        """Let go of an original that was sent."""
        content = self._find(value)
        if content is not None and isinstance(content.bytes, Moved):
            content.bytes.free()

    def encode(self, value: int) -> None:
        """Encode a value where it is."""
        content, decision = self._find(value), self._decisions[value]
        if content is not None:
            assert isinstance(decision, Encode)
            content.encode(decision.codec)
            if self._landing is not None and isinstance(content.bytes, Packed):
                self._landing((content.bytes.encoded.data,))

    def bring(self, value: int) -> None:
        """Have a value on its way back, or decoded."""
        content = self._find(value)
        if content is not None:
            content.bytes.bring()
            if self._landing is not None:
                self._landing((content.bytes.incoming,))

    def _find(self, value: int) -> Content | None:
        known = self._live.get(value)
        return None if known is None else known()


def _counted(act: Callable[P, T]) -> Callable[P, T]:
    """A method of `Contents` with its time counted; its first argument is the value."""

    @functools.wraps(act)
    def counted(*args: P.args, **kwargs: P.kwargs) -> T:
        begun = perf_counter()
        try:
            return act(*args, **kwargs)
        finally:
            contents, value = cast("tuple[CountedContents, int]", args[:2])
            contents.spent(value, perf_counter() - begun)

    return counted


class CountedContents(Contents):
    """Contents of an iteration that is measured."""

    hold = _counted(Contents.hold)
    send = _counted(Contents.send)
    free = _counted(Contents.free)
    encode = _counted(Contents.encode)
    bring = _counted(Contents.bring)

    def spent(self, value: int, seconds: float) -> None:
        """The host spent that on a value."""
        self.host_seconds += seconds
        if isinstance(self._decisions[value], Encode):
            self.encoding_seconds += seconds
