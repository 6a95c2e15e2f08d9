"""What is learned of an iteration while its graphs run watched."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from belady.graph.doors import tensors_on
from belady.graph.joint import Step
from belady.graph.naming import Paths
from belady.graph.parts import Part, Timing, ops_of
from belady.ir.trace import StorageKind
from belady.measure.clock import clock_for
from belady.measure.key import gradients_in
from belady.measure.recipes import reaches
from belady.measure.uninitialized import initialized


class Names:
    """Numbers for storages: the same number is the same storage for as long as this lives.

    Parameters
    ----------
    gone
        Called with the number of a storage when it dies, on whichever thread lets go of it.
    """

    def __init__(self, gone: Callable[[int], None] | None = None) -> None:
        # A weak reference keeps the address from being used again.
        self._known: dict[int, int] = {}
        self._references: list[StorageWeakRef] = []
        self._gone = gone
        self._deaths: list[weakref.ref[torch.UntypedStorage]] = []

    def of(self, item: Any) -> int | None:
        """The number of a tensor's storage; None for what is no tensor."""
        if not isinstance(item, torch.Tensor):
            return None
        storage = item.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None:
            known = self._known[storage._cdata] = len(self._references)
            self._references.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
            if self._gone is not None:
                self._deaths.append(_at_death(storage, partial(self._gone, known)))
        return known

    def lives(self, number: int) -> bool:
        """Whether a storage is still there."""
        return not self._references[number].expired()  # type: ignore[no-untyped-call]

    def holders(self, number: int) -> int:
        """How many tensors lie on a storage now."""
        return tensors_on(self._references[number]) if self.lives(number) else 0


def _at_death(
    storage: torch.UntypedStorage, call: Callable[[], None]
) -> weakref.ref[torch.UntypedStorage]:
    return weakref.ref(storage, lambda _: call())


@dataclass(frozen=True)
class Lasting:
    """Storages of the models that outlive iterations: what they are and their bytes, by number.

    Attributes
    ----------
    paths
        What modules and tensors are called.
    """

    kinds: dict[int, StorageKind]
    sizes: dict[int, int]
    paths: Paths

    @classmethod
    def of(cls, modules: Iterable[torch.nn.Module], names: Names, device: torch.device) -> Lasting:
        """Look at parameters, buffers and gradients."""
        modules, kinds, sizes = list(modules), dict[int, StorageKind](), dict[int, int]()
        for module in modules:
            parameters = initialized(module.parameters())
            buffers = initialized(module.buffers())
            gradients = list(gradients_in([module]))
            for tensors, kind in (
                (parameters, StorageKind.PARAMETER),
                (buffers, StorageKind.BUFFER),
                (gradients, StorageKind.GRADIENT),
            ):
                for tensor in tensors:
                    name = names.of(tensor)
                    if name is not None and tensor.device == device:
                        kinds.setdefault(name, kind)
                        sizes[name] = tensor.untyped_storage().nbytes()
        return cls(kinds, sizes, Paths(modules))


@dataclass
class Watched:
    """One iteration under observation: `belady.graph.state.Watch`, and its parts so far.

    Attributes
    ----------
    released
        Names of storages that came in or went out, and the part before which nobody outside held
        them any more.
    thrown_away
        Calls that have had no backward, and the part before which their state was gone.
    surprises
        Ops whose results lay on other bytes, or on more or fewer, than they were traced with.
    tries
        Whether cheaper ways to results are tried, which takes memory.
    """

    device: torch.device
    names: Names
    lasting: Lasting
    allocated_bytes: int
    tries: bool = False
    parts: list[Part] = field(default_factory=list)
    released: dict[int, int] = field(default_factory=dict)
    thrown_away: dict[int, int] = field(default_factory=dict)
    surprises: set[str] = field(default_factory=set)
    _lies_on: dict[tuple[int, int], int] = field(default_factory=dict)
    _steps: Iterator[Step] = field(default_factory=lambda: iter(()))
    _outside: dict[int, None] = field(default_factory=dict)
    _saved: dict[int, list[int]] = field(default_factory=dict)
    _states: dict[int, weakref.ref[object]] = field(default_factory=dict)
    _host: list[float] = field(default_factory=list)
    _firsts: list[int] = field(default_factory=list)
    _inputs: dict[int, list[tuple[int, torch.Tensor, int]]] = field(default_factory=dict)
    _begun: float = 0.0
    _held_at_end: int = 0
    _trials: list[tuple[Part, int] | None] = field(default_factory=list)

    @classmethod
    def begin(
        cls, modules: Iterable[torch.nn.Module], device: torch.device, *, tries: bool
    ) -> Watched:
        """An iteration begins."""
        names = Names()
        allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        return cls(device, names, Lasting.of(modules, names, device), allocated, tries)

    def __post_init__(self) -> None:
        self._clock, self._trial_clock = clock_for(self.device), clock_for(self.device)

    def start(self) -> None:
        """An op follows."""
        self._clock.start()
        self._begun = perf_counter()

    def stop(self, made: tuple[Any, ...]) -> None:
        """It was issued."""
        self._host.append(perf_counter() - self._begun)
        self._clock.stop()
        step = next(self._steps)
        part = self.parts[-1]
        for node, item in zip(step.made, made, strict=True):
            storage, name = part.layout.storage_of.get(node), self.names.of(item)
            if storage is None or name is None:
                continue
            if item.device != self.device:
                # Attention's seeds are traced on the device of its operands, and are on the host.
                part.layout.sizes[storage] = 0
            else:
                known = self._lies_on.setdefault((part.call, storage), name)
                nbytes = item.untyped_storage().nbytes()
                if known != name or part.layout.sizes[storage] not in (0, nbytes):
                    self.surprises.add(str(step.node.target))

    def seen(self, made: tuple[Any, ...]) -> None:
        """Tensors came back, or were made again: nothing that a trace would tell."""

    def attempt(self, run: Callable[[], torch.Tensor], wanted: torch.Tensor) -> None:
        """Try ``run`` as a way to the bits of ``wanted``, which the last op has made."""
        if self.tries and wanted.device == self.device:
            op = self.parts[-1], len(self._host) - 1 - self._firsts[-1]
            same = reaches(lambda: (run(),), (wanted,), self._trial_clock)
            self._trials.append(op if same else None)

    def enter(self, part: Part, args: Sequence[Any]) -> None:
        """A part begins."""
        self._firsts.append(len(self._host))
        self._note_thrown_away()
        self._note_released()
        if part.forward:
            self._add_outside(part.inputs)
            self._inputs[part.call] = [
                (name, arg, arg._version)
                for name, arg in zip(part.inputs, args, strict=True)
                if name in self.lasting.kinds
            ]
        elif self.parts:
            before = self.parts[-1]
            if self.device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(self.device)
                before.outside_bytes = max(0, peak - self._held_at_end)
            self._note_overwritten(part.call)
        if not part.forward:
            self._saved.pop(part.call, None)
            self._states.pop(part.call, None)
        self.parts.append(part)
        self._steps = iter(ops_of(part))

    def leave(
        self,
        results: Sequence[Any],
        saved: Sequence[torch.Tensor] = (),
        state: object | None = None,
    ) -> None:
        """It has run, and left ``state``, with ``saved`` on storages that others may hold too."""
        part = self.parts[-1]
        part.results = [self.names.of(item) for item in results]
        if part.forward:
            self._add_outside(part.results)
            names = (self.names.of(tensor) for tensor in saved)
            self._saved[part.call] = [name for name in names if name is not None]
            self._states[part.call] = weakref.ref(state)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._held_at_end = torch.cuda.memory_allocated(self.device)

    def finish(self) -> list[Part]:
        """The parts with their timings; waits for the device."""
        seconds = self._clock.results()
        serial = self.device.type == "cpu"
        timings = [
            Timing(device_seconds, 0.0 if serial else host_seconds, workspace)
            for (device_seconds, workspace), host_seconds in zip(seconds, self._host, strict=True)
        ]
        ends = [*self._firsts[1:], len(timings)]
        for part, first, end in zip(self.parts, self._firsts, ends, strict=True):
            part.timings = timings[first:end]
        for op, (took, _) in zip(self._trials, self._trial_clock.results(), strict=True):
            if op is not None:
                op[0].shortcuts[op[1]] = took
        return self.parts

    def unseen_bytes(self) -> int:
        """Device bytes that were there before the iteration and are no operand of it."""
        seen = {name for part in self.parts for name in part.inputs if name is not None}
        if self.device.type == "cpu":
            return sum(n for name, n in self.lasting.sizes.items() if name not in seen)
        known: dict[int, int] = {}
        for part in self.parts[:1]:
            for node, name in zip(part.joint.primals, part.inputs, strict=True):
                storage = part.layout.storage_of.get(node)
                if storage is not None and name is not None:
                    known[name] = part.layout.sizes[storage]
        known |= {name: n for name, n in self.lasting.sizes.items() if name in seen}
        return max(0, self.allocated_bytes - sum(known.values()))

    def _add_outside(self, names: Iterable[int | None]) -> None:
        lasting = self.lasting.kinds
        self._outside |= dict.fromkeys(n for n in names if n is not None and n not in lasting)

    def _note_thrown_away(self) -> None:
        for call in [call for call, state in self._states.items() if state() is None]:
            self.thrown_away[call] = len(self.parts)
            del self._states[call], self._saved[call]

    def _note_released(self) -> None:
        """Which storages are held by nothing but what was saved: each such tensor is one holder."""
        ours = Counter(name for names in self._saved.values() for name in names)
        for name in [*self._outside]:
            if self.names.holders(name) <= ours[name]:
                self.released[name] = len(self.parts)
                del self._outside[name]

    def _note_overwritten(self, call: int) -> None:
        part = next(it for it in self.parts if it.call == call)
        for name, tensor, version in self._inputs.pop(call, ()):
            if tensor._version != version:
                part.overwritten.add(name)
