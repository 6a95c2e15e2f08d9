"""The Trace of one iteration that runs captured graphs: every boundary is in the engine's hands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import fx

from belady.graph import ops as facts
from belady.graph.crossing import Bytes, Call, Content, crossings, nodes_in, save_of
from belady.graph.joint import Step
from belady.graph.parts import Drawn, Part, Timing
from belady.graph.replays import again, shortcut_of
from belady.ir.trace import (
    PERSISTENT,
    Mode,
    Op,
    Phase,
    Replay,
    Source,
    Storage,
    StorageKind,
    Trace,
    Use,
    Value,
)

_NOTHING: Mapping[int, int] = MappingProxyType({})


def draw(
    parts: Sequence[Part],
    device: torch.device,
    unseen_bytes: int = 0,
    released: Mapping[int, int] = _NOTHING,
    thrown_away: Mapping[int, int] = _NOTHING,
) -> Drawn:
    """Draw the trace of ``parts``, in the order in which they ran.

    Parameters
    ----------
    unseen_bytes
        Device bytes that were held throughout without being an operand.
    released
        Names of storages that came in or went out, and the part before which everybody else had let
        go of them; any other is held to the end.
    thrown_away
        Calls whose backward never came, and the part before which what they had saved was gone; of
        any other it is held to the end.
    """
    drawing = _Drawing(device)
    for index, part in enumerate(parts):
        drawing.add(part)
        following = parts[index + 1] if index + 1 < len(parts) else None
        if part.forward and following is not None and not following.forward:
            drawing.outside(part)
    drawing.release(released)
    drawing.hold(thrown_away)
    return drawing.finish(parts, unseen_bytes)


class _Drawing:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ops: list[Op] = []
        self._bytes: list[Bytes] = []
        self._contents: list[Content] = []
        self._latest: dict[int, int] = {}
        self._named: dict[int, int] = {}
        self._calls: dict[int, Call] = {}
        self._starts: list[int] = []

    def add(self, part: Part) -> None:
        """Append the ops of a part."""
        start = len(self._ops)
        self._starts.append(start)
        if part.forward:
            call = self._calls[part.call] = Call(part, start)
            self._enter(call, part, part.joint.primals)
            self._issue(call, part, part.joint.forward)
            self._leave(call, part, part.joint.forward_outputs)
        else:
            call = self._calls[part.call]
            # What was there before is here because it was saved.
            call.turned = start
            self._enter(call, part, part.joint.tangents)
            self._issue(call, part, part.joint.backward)
            self._save(call, part, start)
            self._leave(call, part, part.joint.backward_outputs)
            self._drop_tangents(call, part)

    def outside(self, part: Part) -> None:
        """Append what the user's code does between forward and backward, as one op."""
        workspace = part.outside_bytes
        op = Op("outside", "", Phase.LOSS, part.call, Mode.NORMAL, 0.0, 0.0, workspace, (), ())
        self._ops.append(op)

    def release(self, released: Mapping[int, int]) -> None:
        """Close what others have let go of."""
        for name, part in released.items():
            index = self._named.get(name)
            if index is not None and self._bytes[index].kind not in PERSISTENT:
                self._bytes[index].use(self._starts[part])
                self._bytes[index].open = False

    def hold(self, thrown_away: Mapping[int, int]) -> None:
        """Hold what calls without a backward have saved: nobody reads it, and it cannot move."""
        for number, call in self._calls.items():
            if call.turned is not None:
                continue
            part = thrown_away.get(number)
            gone = len(self._ops) if part is None else self._starts[part]
            for node in call.part.joint.crossing:
                storage = call.part.layout.storage_of.get(node)
                if storage is not None:
                    self._bytes[call.storages[storage]].use(gone)

    def finish(self, parts: Sequence[Part], unseen_bytes: int) -> Drawn:
        """Close what is open."""
        end = len(self._ops)
        storages = [it.closed(str(self._device), end) for it in self._bytes]
        if unseen_bytes > 0:
            other = StorageKind.OTHER
            storages.append(Storage(str(self._device), unseen_bytes, other, 0, end, end))
        values = tuple(
            Value(it.storage, it.version, it.producer, tuple(it.uses), tuple(it.saves))
            for it in self._contents
        )
        trace = Trace(
            Source.GRAPH,
            self._device.type,
            tuple(call.part.name for call in self._calls.values()),
            tuple(self._ops),
            tuple(storages),
            values,
            (),
            (("torch", str(torch.__version__)),),
        )
        by_call = tuple(call.values for call in self._calls.values())
        return Drawn(trace, tuple(parts), tuple(self._starts), by_call)

    def _enter(self, call: Call, part: Part, nodes: Sequence[fx.Node]) -> None:
        start = len(self._ops)
        for node, name in zip(nodes, part.inputs, strict=True):
            storage = part.layout.storage_of.get(node)
            if storage is None:
                continue
            index = None if name is None else self._named.get(name)
            if index is None:
                kind = part.kinds.get(-1 if name is None else name, StorageKind.INPUT)
                birth = 0 if kind in PERSISTENT else start
                index = self._new(part.layout.sizes[storage], kind, birth)
                if name is not None:
                    self._named[name] = index
                # Whoever calls holds what it calls with; gradients go when backward returns.
                self._bytes[index].open = True
            elif part.forward:
                self._keep_apart(index)
            call.storages[storage] = index
            call.holds(storage, self._latest[index], start)

    def _keep_apart(self, index: int) -> None:
        """No replay reaches from one call into another: each has its own state."""
        producer = self._contents[self._latest[index]].producer
        if producer >= 0:
            self._ops[producer] = replace(self._ops[producer], replayable=False)

    def _issue(self, call: Call, part: Part, steps: Sequence[Step]) -> None:
        layout = part.layout
        timings = iter(part.timings)
        overwritten = {
            layout.storage_of.get(node)
            for node, name in zip(part.joint.primals, call.part.inputs, strict=True)
            if name in call.part.overwritten
        }
        for step in steps:
            if not layout.is_op(step):
                continue
            op = self._op(call, part, step, next(timings, Timing()))
            short = self._shortcut(call, part, step)
            # What a random op has drawn is saved where it has a shortcut. And what changes in
            # between would give something else.
            repeatable = (
                part.forward
                and (facts.is_repeatable(step) or (op.random and short is not None))
                and overwritten.isdisjoint(layout.reads(again(step)))
            )
            if part.forward:
                call.by_sequence.setdefault(facts.sequence_of(step), len(self._ops))
            self._ops.append(replace(op, replayable=repeatable, shortcut=short))

    def _op(self, call: Call, part: Part, step: Step, timing: Timing) -> Op:
        index = len(self._ops)
        reads = self._reads(call, part, step, index)
        writes = self._writes(call, part, step, index)
        forward_op = None if part.forward else call.by_sequence.get(facts.sequence_of(step))
        return Op(
            name=facts.name_of(step),
            module=part.module_of(step) if forward_op is None else self._ops[forward_op].module,
            phase=Phase.FORWARD if part.forward else Phase.BACKWARD,
            pass_index=part.call,
            mode=Mode.COMPILED,
            device_seconds=timing.device_seconds,
            host_seconds=timing.host_seconds,
            workspace_bytes=timing.workspace_bytes,
            reads=reads,
            writes=writes,
            random=facts.is_random(step),
            mutates=bool(part.layout.writes_to(step)),
            communicates=facts.communicates(step),
            forward_op=forward_op,
        )

    def _shortcut(self, call: Call, part: Part, step: Step) -> Replay | None:
        seconds = part.shortcuts.get(len(self._ops) - self._starts[-1])
        short = None if seconds is None else shortcut_of(part.joint, step)
        if seconds is None or short is None:
            return None

        def values(storages: Sequence[int]) -> tuple[int, ...]:
            return tuple(self._latest[call.storages[storage]] for storage in storages)

        return Replay(seconds, values(part.layout.reads(short)), values(part.layout.makes(short)))

    def _reads(self, call: Call, part: Part, step: Step, index: int) -> tuple[int, ...]:
        needed, reads = part.layout.reads(again(step)), []
        for storage in part.layout.reads(step):
            held = call.storages[storage]
            if call.turned is None or self._bytes[held].birth >= call.turned:
                self._bytes[held].use(index + 1)
            if storage in needed:
                reads.append(self._latest[held])
                self._contents[reads[-1]].uses.append(Use(index, part.layout.need(step, storage)))
        return tuple(reads)

    def _writes(self, call: Call, part: Part, step: Step, index: int) -> tuple[int, ...]:
        layout, writes = part.layout, []
        for storage in layout.makes(step):
            held = self._new(layout.sizes[storage], StorageKind.ACTIVATION, index)
            call.storages[storage] = held
            call.holds(storage, self._latest[held], index + 1)
            writes.append(self._latest[held])
        for storage in dict.fromkeys(layout.writes_to(step)):
            held = call.storages[storage]
            before, self._latest[held] = self._latest[held], len(self._contents)
            self._contents.append(Content(held, self._contents[before].version + 1, index))
            writes.append(self._latest[held])
            if call.made_at[storage] > call.start:  # what comes in is saved as it came
                call.holds(storage, writes[-1], index + 1)
        return tuple(writes)

    def _new(self, nbytes: int, kind: StorageKind, birth: int) -> int:
        self._bytes.append(Bytes(nbytes, kind, birth, birth + 1))
        index = len(self._bytes) - 1
        self._latest[index] = len(self._contents)
        producer = -1 if kind is not StorageKind.ACTIVATION else birth
        self._contents.append(Content(index, 0, producer))
        return index

    def _save(self, call: Call, part: Part, start: int) -> None:
        """Note what crosses: when it is made, and when backward reads it."""
        for crossing in crossings(part, start, len(self._ops)):
            held = self._bytes[call.storages[crossing.storage]]
            if held.kind not in PERSISTENT:
                held.saved_until = max(held.saved_until, crossing.dropped)
                value = call.values[crossing.storage]
                made = max(self._contents[value].producer, 0)
                save = save_of(call, crossing, value, made, self._ops)
                self._contents[value].saves.append(save)

    def _leave(self, call: Call, part: Part, results: Sequence[object]) -> None:
        """What goes out is held by somebody else from now on."""
        names = part.results or [None] * len(results)
        for place, (node, name) in enumerate(zip(results, names, strict=True)):
            storage = part.layout.storage_of.get(node) if isinstance(node, fx.Node) else None
            if storage is None:
                continue
            index = call.storages[storage]
            held = self._bytes[index]
            held.open = True
            if name is not None:
                self._named[name] = index
            if not part.forward and held.kind is StorageKind.ACTIVATION:
                inputs = call.part.inputs
                of = inputs[place] if place < len(inputs) else None
                if of is not None and call.part.kinds.get(of) is StorageKind.PARAMETER:
                    held.kind = StorageKind.GRADIENT

    def _drop_tangents(self, call: Call, part: Part) -> None:
        """The gradients that a backward was given go when it returns, unless it gives them on."""
        given_on = {part.layout.storage_of.get(n) for n in nodes_in(part.joint.backward_outputs)}
        for node in part.joint.tangents:
            storage = part.layout.storage_of.get(node)
            if storage is not None and storage not in given_on and storage in call.storages:
                held = self._bytes[call.storages[storage]]
                if held.kind not in PERSISTENT:
                    held.end, held.open = len(self._ops), False
