"""Finds the stretches of a trace that the sections of a plan name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NoReturn

from belady.errors import PlanMismatchError
from belady.ir.carrying import find_sums, modules_apart
from belady.ir.drawing import find_draws
from belady.ir.ops import Mode, Op, Phase
from belady.ir.plan import Section
from belady.ir.rows import lie_apart, rows_of, showing
from belady.ir.stretches import Stretch
from belady.ir.trace import Save, StorageKind, Trace
from belady.ir.undivided import undivided


def find(trace: Trace, sections: Iterable[Section]) -> list[Stretch]:
    """Find every stretch of ``sections`` in ``trace``, in the order of the ops.

    Raises
    ------
    PlanMismatchError
        If the trace does not show what is needed to cut a section, naming the section.
    """
    stretches = [
        _Search(trace, section, index).stretch()
        for section in sections
        for index in _passes(trace, section)
    ]
    numbered: list[Stretch] = []
    for stretch in sorted(stretches, key=lambda stretch: stretch.forward):
        start = numbered[-1].parts.stop if numbered else 0
        numbered.append(replace(stretch, parts=range(start, start + len(stretch.sizes))))
    return numbered


def _passes(trace: Trace, section: Section) -> list[int]:
    """Passes in which a section runs; paths of two roots may be the same."""
    found = [index for index in range(len(trace.roots)) if forward_ops(trace, section, index)]
    roots = sorted({trace.roots[index] for index in found})
    if len(roots) != 1:
        where = " and ".join(roots) or "no pass"
        raise PlanMismatchError(
            f"section {title(section)!r} cannot be applied: {where} of this trace has ops of it"
        )
    return found


def title(section: Section) -> str:
    """A section in a message."""
    return "…".join(dict.fromkeys((section.modules[0], section.modules[-1])))


def forward_ops(trace: Trace, section: Section, index: int) -> tuple[int, ...]:
    """Forward ops of a section in pass ``index``."""
    return tuple(
        at
        for at, op in enumerate(trace.ops)
        if op.phase is Phase.FORWARD
        and op.pass_index == index
        and op.mode is Mode.NORMAL
        and _inside(op.module, section.modules)
    )


def brought(trace: Trace, forward: Sequence[int]) -> set[int]:
    """Values from before that ``forward`` reads: but parameters, and what has no samples in it."""
    first = forward[0]
    found = {
        value
        for at in forward
        for value in trace.ops[at].reads
        if trace.values[value].producer < first
        and not trace.storages[trace.values[value].storage].persistent
    }
    return {value for value in found if _has_samples(trace, forward, value)}


def _has_samples(trace: Trace, forward: Sequence[int], value: int) -> bool:
    """Whether any op may read a value as part of the batch."""
    for at in forward:
        op = trace.ops[at]
        if value in op.reads:
            if len(op.batch_dims) != len(op.reads):
                return True
            if op.batch_dims[op.reads.index(value)] is not None:
                return True
    return False


def _inside(module: str, names: Sequence[str]) -> bool:
    return any(not name or module == name or module.startswith(f"{name}.") for name in names)


class _Search:
    """Looks one section up in one pass."""

    def __init__(self, trace: Trace, section: Section, index: int) -> None:
        self.trace = trace
        self.section = section
        self.index = index
        self.name = title(section)
        self.forward = forward_ops(trace, section, index)
        self.backward = self.find_backward()
        self.stages, self.norms = self.find_stages()

    def stretch(self) -> Stretch:
        trace = self.trace
        if not self.backward:
            self.refuse("nothing in it needs a gradient, so it runs whole")
        self.demand_consecutive()
        given = self.single("what goes in", brought(trace, self.forward))
        self.demand_untouched()
        made = self.single("what comes out", self.used_after())
        totals = frozenset(
            trace.values[value].storage for value in self.born_in(self.backward) if self.sums(value)
        )
        full = undivided(trace, (self.forward, self.backward), given, totals)
        gradients = {
            trace.values[value].storage: value
            for op in self.backward
            for value in trace.ops[op].reads
            if self.forward[-1] < trace.values[value].producer < self.backward[0]
        }
        passed_on = self.passed_on(totals)
        born = {given, *self.born_in(self.forward)}
        saves = showing(trace, frozenset(self.forward), self.norms, born, full)
        size, larger = divmod(self.rows(saves), self.section.slices)
        if size < 1:
            self.refuse(f"there are fewer {self.section.unit}s than there are slices")
        return Stretch(
            self.name,
            self.parent(),
            self.forward,
            self.backward,
            self.stages,
            self.norms,
            find_sums(trace, self.backward, gradients.values()),
            modules_apart(trace, self.norms),
            range(self.section.slices),
            tuple(size + (index < larger) for index in range(self.section.slices)),
            given,
            made,
            gradients[self.single("its gradient", gradients)],
            self.single("the gradient of what goes in", passed_on) if passed_on else -1,
            totals,
            full,
            *find_draws(trace, self.forward),
            self.section.along,
            lie_apart(trace, saves, self.section.along),
        )

    def find_backward(self) -> tuple[int, ...]:
        ops, inside = self.trace.ops, set(self.forward)
        found = [
            at
            for at, op in enumerate(ops)
            if op.phase is Phase.BACKWARD
            and (op.forward_op in inside or self.is_inside(at, inside))
            and not self.accumulates(op)
        ]
        # Autograd adds gradients of a fork while the last node of this branch is at hand.
        while found and ops[found[-1]].name.startswith("aten.add") and self.joins(found):
            found.pop()
        return tuple(found)

    def joins(self, backward: Sequence[int]) -> bool:
        """Whether the last of ``backward`` reads a gradient that another branch has made."""
        return any(
            self.forward[-1] < self.trace.values[value].producer < backward[0]
            for value in self.trace.ops[backward[-1]].reads
        )

    def refuse(self, reason: str) -> NoReturn:
        raise PlanMismatchError(f"section {self.name!r} cannot be applied: {reason}")

    def single(self, what: str, found: Iterable[int]) -> int:
        items = sorted(found)
        if len(items) != 1:
            self.refuse(f"{what} is {len(items)} tensors, not one")
        return items[0]

    def demand_untouched(self) -> None:
        """What every slice would write once more must not outlive the slices."""
        trace, first = self.trace, self.forward[0]
        before = {value.storage for value in trace.values if value.producer < first}
        for at in self.forward:
            for value in trace.ops[at].writes:
                storage = trace.values[value].storage
                if at not in self.norms and trace.storages[storage].persistent:
                    self.refuse(f"{trace.locate(at)} writes a buffer")
                if storage in before and not trace.storages[storage].persistent:
                    self.refuse(f"{trace.locate(at)} writes what goes in")

    def parent(self) -> str:
        name = self.section.modules[0]
        if len(self.section.modules) > 1:
            name = name.rpartition(".")[0]
        return name or self.trace.roots[self.index]

    def is_inside(self, at: int, inside: set[int]) -> bool:
        """Whether a backward op of no node (a sum of gradients) stands between two of these."""
        if self.trace.ops[at].forward_op is not None:
            return False
        ops = self.trace.ops
        origins = (
            next((found for it in side if (found := ops[it].forward_op) is not None), -1)
            for side in (range(at, -1, -1), range(at, len(ops)))
        )
        return all(origin in inside for origin in origins)

    def accumulates(self, op: Op) -> bool:
        """Whether an op adds to a gradient that is there already."""
        trace = self.trace
        kinds = {trace.storages[trace.values[value].storage].kind for value in op.writes}
        return op.forward_op is None and StorageKind.GRADIENT in kinds

    def demand_consecutive(self) -> None:
        first, last = self.forward[0], self.forward[-1]
        if last - first + 1 != len(self.forward):
            self.refuse("its ops are not consecutive, or it is called more than once in a pass")
        taken = set(self.backward)
        for at in range(self.backward[0], self.backward[-1] + 1):
            if at not in taken and not self.accumulates(self.trace.ops[at]):
                self.refuse(f"{self.trace.locate(at)} runs in the middle of its backward")

    def find_stages(self) -> tuple[dict[int, int], frozenset[int]]:
        ops, stages, stage = self.trace.ops, {}, 0
        normed = {ops[at].module for at in self.forward if self.takes_statistics(ops[at])}
        norms = frozenset(at for at in self.forward if ops[at].module in normed)
        before = ""
        for at in self.forward:
            if at in norms and ops[at].module != before:
                stage += 1
            before = ops[at].module
            stages[at] = stage
        at_hand = stage
        for at in self.backward:
            origin = ops[at].forward_op
            # A sum of gradients belongs to where the last of them comes from.
            at_hand = stages[at] = at_hand if origin is None else stages[origin]
        return stages, norms

    def takes_statistics(self, op: Op) -> bool:
        """Whether an op is a batch norm in training mode: it keeps what it found of the batch."""
        kept = [v for v in op.writes if self.trace.storages[self.trace.values[v].storage].nbytes]
        return "batch_norm" in op.name and len(kept) > 1

    def born_in(self, ops: Sequence[int]) -> list[int]:
        return [value for at in ops for value in self.trace.ops[at].writes]

    def used_after(self) -> set[int]:
        own = {*self.forward, *self.backward}
        return {
            value
            for value in self.born_in(self.forward)
            if not self.trace.storages[self.trace.values[value].storage].persistent
            and any(use.op not in own for use in self.trace.values[value].uses)
        }

    def sums(self, value: int) -> bool:
        """Whether a value is the gradient of a parameter."""
        trace = self.trace
        if trace.storages[trace.values[value].storage].kind is StorageKind.GRADIENT:
            return True
        return any(self.accumulates(trace.ops[use.op]) for use in trace.values[value].uses)

    def passed_on(self, totals: frozenset[int]) -> set[int]:
        trace, last = self.trace, self.backward[-1]
        born = [v for v in self.born_in(self.backward) if trace.values[v].storage not in totals]
        return {
            value
            for value in born
            if trace.storages[trace.values[value].storage].nbytes
            and (
                any(use.op > last for use in trace.values[value].uses)
                or not trace.values[value].uses
            )
        }

    def rows(self, saves: Sequence[Save]) -> int:
        found = rows_of(self.trace, saves)
        if len(found) != 1:
            whole, unit = self.section.whole, self.section.unit
            self.refuse(f"its {whole} cannot be told from what it saves: {found} {unit}s")
        return found[0]
