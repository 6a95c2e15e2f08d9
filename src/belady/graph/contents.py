"""The bytes of one saved storage while a graph's state holds them, wherever they are."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from belady.ir.trace import Tier
from belady.memory.carrier import Arrival, Carrier, Parcel
from belady.memory.codecs import Encoded, decode, encode
from belady.memory.geometry import Geometry, content_of, unseen
from belady.memory.witness import demand_unchanged, witness


class Content:
    """Bytes that leave the device, or are encoded there, and come back.

    Of ``source`` (the original), ``parcel`` or ``encoded`` (the copy) and the bytes under way back
    at least one is there at any time, so the value can always be taken.

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
    identity
        Weak reference to the storage; while it lives its address names no other storage.
    """

    def __init__(
        self, tensor: torch.Tensor, carrier: Carrier, label: int, *, guarded: bool
    ) -> None:
        self.identity = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._shadow = witness(tensor) if guarded else None
        self._version = 0 if self._shadow is None else self._shadow._version
        self._shape = tensor.shape
        self._carrier = carrier
        self._label = label
        self._dtype = tensor.dtype
        self._source: torch.Tensor | None = content_of(tensor, 0, tensor.untyped_storage().nbytes())
        self._parcel: Parcel | None = None
        self._encoded: Encoded | None = None
        self._arrival: Arrival | None = None
        self._decoded: torch.Tensor | None = None
        # Streams: of the op that makes the bytes, and of their way back.
        self._producer = _current_stream(carrier.device)
        self._home: torch.cuda.Stream | None = None

    def send(self, tier: Tier) -> None:
        """Issue the copy-out, once; it follows what the producer's stream has been given so far.

        Raises
        ------
        TierFullError, SpillError
            If the tier cannot take the bytes; they stay.
        """
        if self._parcel is None and self._source is not None:
            with torch.cuda.stream(self._producer):
                self._parcel = self._carrier.send(self._source, tier, self._label)

    def free(self) -> None:
        """Make compute wait for the copy-out and let go of the original."""
        if self._parcel is not None and self._source is not None:
            self._parcel.wait_sent()
            self._source = None

    def encode(self) -> None:
        """Replace the original by an encoding, where that saves bytes."""
        source = self._source
        if source is None or source.numel() % self._dtype.itemsize:
            return
        count = source.numel() // self._dtype.itemsize
        whole = Geometry(self._dtype, torch.Size([count]), (1,), 0, False, False)
        self._encoded = encode(whole.on(source))
        if self._encoded is not None:
            self._source = None

    def bring(self) -> None:
        """Take device bytes and issue the copy-in, or decode; nothing where the bytes are here."""
        if self._source is not None:
            return
        if self._encoded is not None and self._decoded is None:
            self._decoded = decode(self._encoded).view(-1).view(torch.uint8)
        elif self._parcel is not None and self._arrival is None:
            self._home = _current_stream(self._carrier.device)
            self._arrival = self._parcel.fetch()

    @property
    def incoming(self) -> tuple[torch.Tensor, ...]:
        """The device bytes that were taken for it and not given yet."""
        arrival = () if self._arrival is None else (self._arrival.tensor,)
        return arrival if self._decoded is None else (self._decoded,)

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
        if self._source is not None:
            return self._source
        self.bring()
        if self._decoded is not None:
            decoded, self._decoded = self._decoded, None
            return decoded
        arrival, self._arrival = self._arrival, None
        if arrival is None:
            raise RuntimeError("the bytes of a saved value are in no tier")
        arrival.wait()
        reader = _current_stream(self._carrier.device)
        if reader is not None and reader != self._home:
            # The bytes belong to the stream that asked for them; without this it could use them
            # again while another one reads.
            arrival.tensor.record_stream(reader)
        return arrival.tensor


class Contents:
    """The contents of one iteration, by value: what generated code calls.

    Only weakly held here, since a value lives as long as the state that holds it: copies of a
    graph that was thrown away are not made. ``landing`` is told of device bytes taken.
    """

    def __init__(
        self,
        carrier: Carrier,
        tiers: Mapping[int, Tier],
        landing: Callable[[tuple[torch.Tensor, ...]], None] | None = None,
    ) -> None:
        self._carrier = carrier
        self._tiers = tiers
        self._landing = landing
        self._live: dict[int, weakref.ref[Content]] = {}

    def hold(self, value: int, tensor: torch.Tensor, guarded: bool) -> Content:
        """Begin to manage the storage of ``tensor``, or go on, where another call began.

        What turns out to be on another device than it was traced on stays where it is.
        """
        known = self._find(value)
        if known is not None and known.identity.cdata == tensor.untyped_storage()._cdata:
            return known
        with unseen():
            content = Content(tensor, self._carrier, value, guarded=guarded)
        if tensor.device == self._carrier.device:
            self._live[value] = weakref.ref(content)
        return content

    def send(self, value: int) -> None:
        """Issue a copy-out."""
        content = self._find(value)
        if content is not None:
            with unseen():
                content.send(self._tiers[value])

    def free(self, value: int) -> None:
        """Let go of an original that was sent."""
        content = self._find(value)
        if content is not None:
            content.free()

    def encode(self, value: int) -> None:
        """Encode a value where it is."""
        content = self._find(value)
        if content is not None:
            with unseen():
                content.encode()

    def bring(self, value: int) -> None:
        """Have a value on its way back, or decoded."""
        content = self._find(value)
        if content is not None:
            with unseen():
                content.bring()
            if self._landing is not None:
                self._landing(content.incoming)

    def _find(self, value: int) -> Content | None:
        known = self._live.get(value)
        return None if known is None else known()


def _current_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
