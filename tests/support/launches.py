"""What stands for CUDA graphs on a CPU: what was captured runs again, into the same places."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from belady.graph import beside, capturing, launching
from belady.graph.contents import Content
from belady.ir.trace import Tier
from belady.memory.contents import Moved
from belady.memory.launches import Launches
from belady.simulate.holes import Holes
from belady.simulate.packing import Packing
from belady.simulate.stretch import Event

# What a piece of memory is said to be divided into best; and in how many ways a pool may begin.
DIVISIONS: list[Holes] = [(1,), (), (3, 2)]
WAYS = 1 + len(DIVISIONS)


class Rerun:
    """`belady.graph.launched.Capturing`: as a capture it changes nothing but what it gives.

    Parameters
    ----------
    models
        What is captured writes to their buffers, which happens at launches alone.
    holes
        What the pool would begin with.

    Attributes
    ----------
    launched, lent
        How often something was.
    reserved
        What an allocator would reserve.
    lacking, keeping
        Whether what is lent has no room, and whether something of it is kept.
    """

    reserved = 0
    lacking = keeping = False

    def __init__(self, models: Sequence[nn.Module], holes: Holes | None) -> None:
        self.holes = holes
        self.launched = self.lent = self.peak_bytes = 0
        self.lending = False
        self._models = models
        self._known: list[list[torch.UntypedStorage]] = []
        self._others = set[int]()

    def capture(self, issue: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        buffers = [it for model in self._models for it in model.buffers()]
        lasting = {it.data_ptr() for model in self._models for it in model.parameters()}
        lasting |= {it.data_ptr() for it in buffers}
        before, random = [it.clone() for it in buffers], torch.get_rng_state()
        given = issue()
        places = [it.untyped_storage() for it in _tensors(given)]
        self._known.append(places)
        torch.set_rng_state(random)
        for buffer, it in zip(buffers, before, strict=True):
            buffer.data.copy_(it)

        def launch() -> None:
            assert not self.lending
            self.launched += 1
            # Held until all is copied: what of it has the address of another is the same.
            made = issue()
            for place, it in zip(places, _tensors(made), strict=True):
                if place.data_ptr() != it.data_ptr():
                    place.copy_(it.untyped_storage())
            if places is self._known[-1] and len(self._known) > 1:
                # Memory of forward is written to while backward runs.
                kept = lasting | self._others | {it.data_ptr() for it in places}
                for it in self._known[-2]:
                    if it.data_ptr() not in kept:
                        it.fill_(255)

        return launch, given

    def divide(self) -> None:
        pass

    def seen(self, tensor: Tensor) -> Tensor:
        if self._known:
            return tensor
        # What is read where it lies belongs to others.
        self._others.add(tensor.untyped_storage().data_ptr())
        seen: Tensor = Launches.seen(cast("Any", self), tensor)
        return seen

    def follow(self) -> None:
        pass

    def lend(self) -> Callable[[], bool]:
        assert not self.lending
        self.lent, self.lending = self.lent + 1, True
        return self._give_back

    def _give_back(self) -> bool:
        self.lending = False
        return not self.keeping

    def has_room_for(self, events: Sequence[Event]) -> bool:
        return not self.lacking

    @property
    def reserved_bytes(self) -> int:
        return self.reserved

    def over(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def forget(self) -> None:
        pass


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those of a result of forward or backward, and of the contents in it."""
    if isinstance(value, (list, tuple)):
        for it in value:
            yield from _tensors(it)
    elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, Content):
        found = value.bytes
        if isinstance(found, Moved):
            arrived = None if found.arrival is None else found.arrival.tensor
            yield from (it for it in (found.source, arrived, found.here) if it is not None)
        else:
            yield from (it for it in (found.encoded.data, found.here) if it is not None)


def launching_on_a_cpu(monkeypatch: pytest.MonkeyPatch, models: Sequence[nn.Module]) -> list[Rerun]:
    """Have iterations launched that gain nothing; what stands for their graphs, as it is made."""
    made: list[Rerun] = []

    def launches(
        device: torch.device, holes: Holes | None, room_bytes: int, packing: Packing | None
    ) -> Rerun:
        made.append(Rerun(models, holes))
        return made[-1]

    monkeypatch.setattr(capturing, "Launches", launches)
    # Where the next batch comes to lie on a CPU is anybody's guess.
    monkeypatch.setattr(beside, "still", lambda kind: set())
    monkeypatch.setattr(capturing, "divisions", lambda *_: DIVISIONS)
    monkeypatch.setattr(capturing, "_MOST_S", math.inf)
    monkeypatch.setattr(launching, "captures", lambda device: True)
    monkeypatch.setattr(launching, "_GAINS", -100.0)
    # There is no other tier below a CPU, and to fixed places it is memory anyway.
    monkeypatch.setattr(launching, "_TIERS", {Tier.HOST, Tier.DISK})
    return made
