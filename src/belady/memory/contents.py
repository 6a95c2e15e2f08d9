"""The bytes of one saved storage at one version, wherever they are: what both engines move."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from belady.ir.plan import Managed
from belady.ir.trace import Tier
from belady.memory.carrier import Carrier
from belady.memory.codecs import Encoded, decode, encode, encode_as
from belady.memory.geometry import Geometry, content_of, seen, unseen
from belady.memory.sending import Landing, Sender, Sent
from belady.memory.streams import current_stream

# To enter a real context where nothing is to be shut out costs as much as an allocation.
_AS_IT_IS = nullcontext()


class Moved:
    """Bytes that leave the device and come back.

    ``source`` (the original), ``parcel`` (the copy elsewhere) and ``here`` (the bytes brought
    back) are never all absent, so the value can always be taken.

    Parameters
    ----------
    tensor
        A saved tensor; bytes ``start`` to ``stop`` of its storage are managed.

    Attributes
    ----------
    identity
        Weak reference to the storage; while it lives its address names no other storage.
    version
        Version of the tensor when its bytes were taken.
    unread
        Reads in backward that are still to come, where a plan knows them.
    given
        Witnesses of the tensors handed out on the present bytes, and their versions.
    label
        What records call the bytes: the number of the value in the trace.
    """

    def __init__(self, tensor: torch.Tensor, start: int, stop: int, carrier: Sender) -> None:
        self.identity = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.version = tensor._version
        self.unread = 0
        self.label = -1
        self.given: list[tuple[torch.Tensor, int]] = []
        self.skipped_bytes = start
        self.carrier = carrier
        self.source: torch.Tensor | None = content_of(tensor, start, stop)
        self.parcel: Sent | None = None
        self.arrival: Landing | None = None
        self.here: torch.Tensor | None = None
        # Streams: of the op that saves the bytes, of their way back, and of their last reader.
        self._producer = current_stream(carrier.device)
        self._home: torch.cuda.Stream | None = None
        self._reader: torch.cuda.Stream | None = None

    def send(self, tier: Tier) -> None:
        """Issue the copy-out, once; it follows what the saving op's stream has been given so far.

        Raises
        ------
        TierFullError, SpillError
            If the tier cannot take the bytes; they stay.
        """
        if self.parcel is None and self.source is not None:
            with self._after_producer():
                self.parcel = self.carrier.send(self.source, tier, self.label)

    def free(self) -> None:
        """Make compute wait for the copy-out and let go of the original."""
        if self.parcel is not None and self.source is not None:
            self.parcel.wait_sent()
            self.source = None
            self.given.clear()

    def bring(self) -> None:
        """Take device bytes and issue the copy-in, unless the bytes are here."""
        if self.parcel is not None and self.source is None and self.arrival is None:
            self._home = current_stream(self.carrier.device)
            with unseen() if seen() else _AS_IT_IS:
                self.arrival = self.parcel.fetch()

    def take(self) -> torch.Tensor:
        """Give the bytes, making the reader's stream wait for the copy-in."""
        if self.source is not None:
            return self.source
        self.bring()
        arrival, reader = self.arrival, current_stream(self.carrier.device)
        if arrival is None:
            raise RuntimeError("the bytes of a saved value are in no tier")
        if self.here is None or reader is not self._reader:
            arrival.wait()
            self.here, self._reader = arrival.tensor, reader
            if reader is not self._home and reader is not None:
                # The bytes belong to the stream that asked for them; without this it could use
                # them again while another one reads.
                self.here.record_stream(reader)
        return self.here

    @property
    def incoming(self) -> torch.Tensor | None:
        """The device bytes taken for its way back, once they are."""
        return None if self.arrival is None else self.arrival.tensor

    def without_holding(self, seen: Callable[[torch.Tensor], torch.Tensor]) -> Moved:
        """A copy of its present state that has its device bytes as ``seen`` shows them."""
        found = copy.copy(self)
        found.given = []
        found.source = None if self.source is None else seen(self.source)
        found.here = None if self.here is None else seen(self.here)
        if self.arrival is not None:
            found.arrival = copy.copy(self.arrival)
            found.arrival.tensor = seen(self.arrival.tensor)
        return found

    def _after_producer(self) -> AbstractContextManager[object]:
        """Unseen by dispatch modes, on the stream of the op that saves the bytes."""
        producer = self._producer
        there = producer is None or producer is current_stream(self.carrier.device)
        if there and not seen():
            return _AS_IT_IS
        with ExitStack() as stack:
            stack.enter_context(unseen())
            if not there:
                stack.enter_context(torch.cuda.stream(producer))
            return stack.pop_all()

    @property
    def shared(self) -> bool:
        """Whether another reader would get the same bytes."""
        return self.source is not None or self.here is not None

    def let_go(self) -> None:
        """Drop the bytes brought back; autograd holds those that it still needs."""
        if self.source is None:
            self.here = self.arrival = None
            self.given.clear()


class Paged(Moved):
    """Bytes in a managed block, which is what is handed out: there is no other copy of them."""

    def __init__(self, tensor: torch.Tensor, carrier: Carrier, decision: Managed) -> None:
        super().__init__(tensor, 0, tensor.untyped_storage().nbytes(), carrier)
        self._decision, self._paging = decision, carrier.paging

    def send(self, tier: Tier) -> None:
        """Copy the bytes into a block, let go of the original, and issue the block's way out.

        Where the plan says both of one boundary, compute is also told to wait for it: of several
        values there, one at a time is on the device.

        Raises
        ------
        TierError
            If there is no block, or the driver refuses; the bytes stay.
        """
        if self.parcel is None and self.source is not None:
            decision = self._decision
            with self._after_producer():
                self.parcel = self._paging.send(self.source, self.label, faults=decision.faults)
            self.source = None
            self.given.clear()
            if decision.gone_by == decision.prefetch_out_at:
                self.free()

    def free(self) -> None:
        """Make compute wait for the block's way out."""
        if self.parcel is not None:
            self.parcel.wait_sent()

    @property
    def shared(self) -> bool:
        """Whether another reader would get the same bytes: always, unlike those of a copy."""
        return True

    def let_go(self) -> None:
        """Let a later read ask for the bytes again; they stay in the block."""
        if self.source is None:
            self.here = self.arrival = None


class Packed:
    """Bytes held on the device in a lossless encoding."""

    def __init__(self, tensor: torch.Tensor, encoded: Encoded) -> None:
        self.identity = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.version = tensor._version
        self.unread = 0
        self.given: list[tuple[torch.Tensor, int]] = []
        self.skipped_bytes = 0
        self.dtype = tensor.dtype
        self.encoded = encoded
        self.here: torch.Tensor | None = None
        # Streams on which the encoding was made, and the bytes brought back.
        self._made_on = self._here_on = current_stream(tensor.device)

    @classmethod
    def of(cls, tensor: torch.Tensor, codec: str = "") -> Packed | None:
        """Encode the whole storage of ``tensor``; None when that gains nothing.

        Parameters
        ----------
        codec
            What a plan says; without one the elements are looked at, for which the host waits.
        """
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes % tensor.dtype.itemsize:
            return None
        whole = Geometry(
            tensor.dtype, torch.Size([nbytes // tensor.dtype.itemsize]), (1,), 0, False, False
        )
        with unseen():
            flat = whole.on(content_of(tensor, 0, nbytes))
            encoded = encode_as(codec, flat) if codec else encode(flat)
        return None if encoded is None else cls(tensor, encoded)

    def bring(self) -> None:
        """Decode the bytes, unless they are here."""
        if self.here is None:
            with unseen():
                self._here_on = _followed(self.encoded.data, self._made_on)
                self.here = decode(self.encoded).view(-1).view(torch.uint8)

    def take(self) -> torch.Tensor:
        """Give the bytes."""
        self.bring()
        assert self.here is not None
        _followed(self.here, self._here_on)
        return self.here

    def without_holding(self, seen: Callable[[torch.Tensor], torch.Tensor]) -> Packed:
        """As `Moved.without_holding`."""
        found = copy.copy(self)
        found.given = []
        found.encoded = replace(self.encoded, data=seen(self.encoded.data))
        found.here = None if self.here is None else seen(self.here)
        return found

    @property
    def incoming(self) -> torch.Tensor | None:
        """The device bytes taken for it, once they are."""
        return self.here

    @property
    def shared(self) -> bool:
        """Whether another reader would get the same bytes."""
        return self.here is not None

    def let_go(self) -> None:
        """Drop the decoded bytes."""
        self.here = None
        self.given.clear()


def _followed(data: torch.Tensor, made_on: torch.cuda.Stream | None) -> torch.cuda.Stream | None:
    """The present stream, which waits for the one on which ``data`` was made if it is another."""
    stream = current_stream(data.device)
    if stream is not None and made_on is not None and stream != made_on:
        stream.wait_stream(made_on)
        data.record_stream(stream)
    return stream
