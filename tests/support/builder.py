"""A consistent trace from a list of what each forward op does.

Forward ops are 0..n-1; the backward op of forward op ``i`` is ``2n-1-i``. Each forward op writes
one value and reads one or more earlier ones; its backward op reads what it saved and the
gradient of its output, and writes the gradients of its inputs and of its parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from belady.ir.trace import (
    Algorithm,
    Mode,
    Op,
    Phase,
    Save,
    Source,
    Storage,
    StorageKind,
    Tier,
    Trace,
    Use,
    Value,
)

_REACH = 4  # values that a branch can go back


@dataclass(frozen=True)
class OpSpec:
    """One forward op.

    Attributes
    ----------
    parameter_bytes
        Size of the parameter that it reads and saves; 0 for none.
    branch
        How many values back it reads from (0: the previous op's). What it skips is read later.
    join
        Whether it also reads a branch that is still open.
    in_place
        Whether it overwrites what it reads, where autograd would allow that.
    asked
        Whether backward takes back what this op saves.
    lean_algorithm
        Whether there is a slower way to run it without workspace.
    replayable
        Whether it gives the same again.
    mask
        Whether it is a comparison, whose result is bools.
    """

    nbytes: int = 1024
    device_us: int = 10
    host_us: int = 5
    workspace_bytes: int = 0
    parameter_bytes: int = 0
    branch: int = 0
    join: bool = False
    saves_input: bool = True
    saves_output: bool = False
    in_place: bool = False
    asked: bool = True
    lean_algorithm: bool = False
    replayable: bool = False
    mask: bool = False


@dataclass
class _Bytes:
    nbytes: int
    kind: StorageKind
    birth: int
    released: int
    death: int


@dataclass
class _Content:
    storage: int
    version: int
    producer: int
    uses: list[Use] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


class _Builder:
    def __init__(self, specs: Sequence[OpSpec], device: str) -> None:
        self.specs = specs
        self.device = device
        self.end = 2 * len(specs)
        self.storages: list[_Bytes] = []
        self.values: list[_Content] = []
        self.reads: list[list[int]] = [[] for _ in range(self.end)]
        self.writes: list[list[int]] = [[] for _ in range(self.end)]
        self.mutates: set[int] = set()
        self.parameters: dict[int, int] = {}
        self.weights: set[int] = set()
        self.inputs: dict[int, list[int]] = {}
        self.taken_back: dict[int, list[int]] = {}
        self.saved = 0

    def new(self, nbytes: int, kind: StorageKind, producer: int) -> int:
        """Add a storage and its first value; persistent ones live to the end."""
        birth = max(producer, 0)
        end = birth + 1 if kind is StorageKind.ACTIVATION else self.end
        self.storages.append(_Bytes(nbytes, kind, birth, end, end))
        return self.write(len(self.storages) - 1, 0, producer)

    def write(self, storage: int, version: int, producer: int) -> int:
        self.values.append(_Content(storage, version, producer))
        if producer >= 0:
            self.writes[producer].append(len(self.values) - 1)
        return len(self.values) - 1

    def read(self, op: int, value: int, *, holds: bool) -> None:
        """Let ``op`` read ``value``; with ``holds`` the storage must live until then."""
        if value not in self.reads[op]:
            self.reads[op].append(value)
            self.values[value].uses.append(Use(op))
        if holds:
            storage = self.storages[self.values[value].storage]
            storage.released = max(storage.released, op + 1)
            storage.death = max(storage.death, op + 1)

    def save(self, op: int, value: int, *, as_input: bool) -> None:
        content = self.values[value]
        storage = self.storages[content.storage]
        back = self.end - 1 - op
        asked = self.specs[op].asked
        content.saves.append(
            Save(
                pass_index=0,
                ordinal=self.saved,
                op=op,
                packed=op if as_input else op + 1,
                reads=(back,) if asked else (),
                dropped=back + 1,
                as_input=as_input,
                module=f"layer{op}",
                shape=(storage.nbytes,),
                stride=(1,),
                offset=0,
                dtype="bool" if self.is_mask(content) else "uint8",
            )
        )
        self.saved += 1
        if asked:
            self.taken_back.setdefault(op, []).append(value)
        storage.death = max(storage.death, back + 1)

    def is_mask(self, content: _Content) -> bool:
        return content.producer >= 0 and self.specs[content.producer].mask

    def forward(self) -> None:
        pool = [self.new(4096, StorageKind.INPUT, -1)]
        unread = {pool[0]}
        for op, spec in enumerate(self.specs):
            self.inputs[op] = self._choose(op, spec, pool, unread)
            unread -= set(self.inputs[op])
            for value in self.inputs[op]:
                self.read(op, value, holds=True)
            self._save_inputs(op, spec)
            written = self._output(op, spec)
            replaced = self.inputs[op][:1] if op in self.mutates else []
            pool = [value for value in pool[-_REACH:] if value not in replaced] + [written]
            unread.add(written)
            if spec.saves_output:
                self.save(op, written, as_input=False)

    def _choose(self, op: int, spec: OpSpec, pool: list[int], unread: set[int]) -> list[int]:
        if op == len(self.specs) - 1:
            return sorted(unread, reverse=True)
        chosen = [pool[max(0, len(pool) - 1 - spec.branch)]]
        open_branches = sorted(unread - set(chosen))
        return chosen + open_branches[:1] if spec.join else chosen

    def _save_inputs(self, op: int, spec: OpSpec) -> None:
        if spec.saves_input and not self._in_place(op, spec):
            self.save(op, self.inputs[op][0], as_input=True)
        if spec.parameter_bytes:
            weight = self.new(spec.parameter_bytes, StorageKind.PARAMETER, -1)
            self.parameters[op] = weight
            self.weights.add(weight)
            self.read(op, weight, holds=True)
            self.save(op, weight, as_input=True)

    def _in_place(self, op: int, spec: OpSpec) -> bool:
        content = self.values[self.inputs[op][0]]
        storage = self.storages[content.storage]
        return spec.in_place and not content.saves and storage.kind is StorageKind.ACTIVATION

    def _output(self, op: int, spec: OpSpec) -> int:
        if not self._in_place(op, spec):
            return self.new(spec.nbytes, StorageKind.ACTIVATION, op)
        self.mutates.add(op)
        source = self.inputs[op][0]
        return self.write(self.values[source].storage, self.values[source].version + 1, op)

    def backward(self) -> None:
        gradients: dict[int, list[int]] = {}
        for op in reversed(range(len(self.specs))):
            back = self.end - 1 - op
            for value in self.taken_back.get(op, []):
                self.read(back, value, holds=False)
            for written in self.writes[op]:
                for gradient in gradients.get(written, []):
                    self.read(back, gradient, holds=True)
            for value in self.inputs[op]:
                storage = self.storages[self.values[value].storage]
                if storage.kind is StorageKind.ACTIVATION:
                    new = self.new(storage.nbytes, StorageKind.ACTIVATION, back)
                    gradients.setdefault(value, []).append(new)
            if op in self.parameters:
                self.new(self.specs[op].parameter_bytes, StorageKind.GRADIENT, back)

    def op(self, index: int, *, loss: bool) -> Op:
        forward = index if index < len(self.specs) else self.end - 1 - index
        spec, back = self.specs[forward], index >= len(self.specs)
        phase = Phase.BACKWARD if back else Phase.LOSS if loss else Phase.FORWARD
        seconds = spec.device_us * (2e-6 if back else 1e-6)
        algorithms: tuple[Algorithm, ...] = ()
        if spec.lean_algorithm and not back:
            algorithms = (
                Algorithm("fast", seconds, spec.workspace_bytes),
                Algorithm("lean", 1.5 * seconds + 1e-6, 0),
            )
        return Op(
            name="layer_backward" if back else "aten.gt.Scalar" if spec.mask else "layer",
            module=f"layer{forward}",
            phase=phase,
            pass_index=0,
            mode=Mode.NORMAL,
            device_seconds=seconds,
            host_seconds=spec.host_us * 1e-6,
            workspace_bytes=spec.workspace_bytes,
            reads=tuple(self.reads[index]),
            writes=tuple(self.writes[index]),
            mutates=index in self.mutates,
            batch_dims=tuple(None if v in self.weights else 0 for v in self.reads[index]),
            forward_op=forward if back else None,
            algorithms=algorithms,
            replayable=spec.replayable and not back,
        )


def build_trace(
    specs: Sequence[OpSpec],
    *,
    device: str = "cuda",
    every_boundary: bool = False,
    input_held: bool = True,
    loss: bool = False,
) -> Trace:
    """Trace of these forward ops and their backward.

    Parameters
    ----------
    every_boundary
        Whether the engine gets control everywhere (a graph) instead of at saves and reads.
    input_held
        Whether the caller holds the input to the end of the iteration.
    loss
        Whether the last forward op is outside every root.
    """
    build = _Builder(specs, device)
    build.forward()
    build.backward()
    if not input_held:
        first, given = build.storages[0], build.values[0]
        first.released = max((u.op + 1 for u in given.uses if u.op < len(specs)), default=0)
        first.death = max([first.released, *(save.dropped for save in given.saves)])
    anchors = {
        boundary
        for content in build.values
        for save in content.saves
        for boundary in (save.packed, *save.reads)
    }
    return Trace(
        source=Source.GRAPH if every_boundary else Source.EAGER,
        device=device,
        roots=("Net",),
        ops=tuple(
            build.op(index, loss=loss and index == len(specs) - 1) for index in range(build.end)
        ),
        storages=tuple(_storage(build, item) for item in build.storages),
        values=tuple(
            Value(c.storage, c.version, c.producer, tuple(c.uses), tuple(c.saves))
            for c in build.values
        ),
        anchors=() if every_boundary else tuple(sorted(anchors)),
        versions=(("torch", "2.11.0"),),
    )


def _storage(build: _Builder, item: _Bytes) -> Storage:
    persistent = item.kind in (StorageKind.PARAMETER, StorageKind.GRADIENT)
    return Storage(
        device="cuda:0" if build.device == "cuda" else build.device,
        nbytes=item.nbytes,
        kind=item.kind,
        birth=item.birth,
        released=item.released,
        death=item.death,
        home=Tier.DEVICE if persistent else None,
    )
