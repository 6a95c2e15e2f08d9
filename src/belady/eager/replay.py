"""Saved values that are not kept but made again, by running the ops that made them.

Nothing of the user's code runs again: no module, no hook, no random number. What runs again are ops
that were seen to give the same bits (`belady.measure.recipes`), on inputs that are there anyway:
parameters, and values that autograd saves for nodes that come later in backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from belady.eager.digests import Digests, digest
from belady.errors import PlanMismatchError, ReplayError
from belady.ir.hardware import Allocator
from belady.ir.plan import Plan, Recompute
from belady.ir.scratch import replay_steps
from belady.ir.trace import Trace
from belady.measure.calls import Call
from belady.measure.recipes import Operand, Recipe
from belady.measure.recorder import Recorder
from belady.memory.geometry import Geometry, content_of, unseen
from belady.memory.streams import current_stream

# Gives the bytes of a value and how many of its storage are left out before them.
Source = Callable[[Geometry], torch.Tensor]


@dataclass(frozen=True)
class Recipes:
    """How the ops of a trace are run again, and the tensors that own its persistent storages.

    Attributes
    ----------
    calls
        What the program called in the iteration observed, by pass.
    expected
        The calls that were known to change by then: (pass, number of the call in it).
    varying
        Where more of them are added.
    """

    by_op: Mapping[int, Recipe] = field(default_factory=dict)
    owners: Mapping[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    calls: list[list[Call]] = field(default_factory=list)
    expected: frozenset[tuple[int, int]] = frozenset()
    varying: set[tuple[int, int]] = field(default_factory=set)

    @classmethod
    def of(cls, recorder: Recorder, varying: set[tuple[int, int]]) -> Recipes:
        """Those of the iteration that ``recorder`` has watched, if it tried any."""
        if recorder.trials is None:
            return cls()
        known = recorder.trials.learner
        return cls(recorder.trials.recipes, recorder.owners, known.passes, known.varying, varying)


@dataclass(frozen=True, slots=True)
class Chain:
    """The recipes of one replay, in order, what they need, and what is spent after each.

    Attributes
    ----------
    value
        What it makes; the whole storage of ``nbytes`` bytes.
    made_by
        The op that does, as errors name it.
    once
        Whether it is saved once, so that no other save can be of the same bytes.
    saved, owned
        Values that other saves hold, and the tensors of those that persist.
    """

    value: int
    made_by: str
    nbytes: int
    once: bool
    recipes: tuple[Recipe, ...]
    spent: tuple[tuple[int, ...], ...]
    saved: tuple[int, ...]
    owned: Mapping[int, weakref.ref[torch.Tensor]]


def chains(trace: Trace, plan: Plan, recipes: Recipes) -> dict[int, Chain]:
    """The replay of every value that ``plan`` recomputes.

    Raises
    ------
    PlanMismatchError
        If the plan replays an op that has no recipe.
    """
    found = {}
    for value, decision in plan.decisions.items():
        if isinstance(decision, Recompute):
            found[value] = _chain(trace, value, decision, recipes)
    return found


def _chain(trace: Trace, value: int, decision: Recompute, recipes: Recipes) -> Chain:
    missing = [op for op in decision.ops if op not in recipes.by_op]
    if missing:
        raise PlanMismatchError(f"{trace.locate(missing[0])} cannot be run again here")
    steps = tuple(recipes.by_op[op] for op in decision.ops)
    made: set[int] = set()
    saved: list[int] = []
    owned: dict[int, weakref.ref[torch.Tensor]] = {}
    for step in steps:
        for operand in step.operands():
            storage = trace.values[operand.value].storage
            if operand.value in made:
                continue
            if trace.storages[storage].persistent:
                owned[operand.value] = recipes.owners[storage]
            else:
                saved.append(operand.value)
        made.update(step.outputs)
    nbytes = trace.storages[trace.values[value].storage].nbytes
    once = len(trace.values[value].saves) == 1
    spent = _spent(trace, value, decision)
    made_by = trace.locate(trace.values[value].producer)
    return Chain(value, made_by, nbytes, once, steps, spent, tuple(dict.fromkeys(saved)), owned)


def _spent(trace: Trace, value: int, decision: Recompute) -> tuple[tuple[int, ...], ...]:
    """What a replay makes and, after each of its ops, does not need any more."""
    found = []
    made: set[int] = set()
    steps = replay_steps(trace, value, decision, Allocator(1, 0.0, 0))
    for op, step in zip(decision.ops, steps, strict=True):
        made.update(trace.ops[op].replay.writes)
        freed = {storage for storage, _ in step.freed}
        found.append(tuple(v for v in made if trace.values[v].storage in freed))
        made.difference_update(found[-1])
    return tuple(found)


class Recomputed:
    """Bytes that are made again when they are read.

    Parameters
    ----------
    tensor
        The saved tensor; it is not held.
    versions
        Of the tensors in ``chain.owned``.
    sources
        Of the values in ``chain.saved``. Each keeps its value alive, for as long as this lives.
    digests
        Told how each replay came out.
    """

    __slots__ = (
        *("__weakref__", "given", "here", "identity", "skipped_bytes", "unread", "version"),
        *("_chain", "_digest", "_digests", "_reader", "_sources", "_versions"),
    )

    def __init__(
        self,
        tensor: torch.Tensor,
        chain: Chain,
        versions: Mapping[int, int],
        sources: Mapping[int, Source],
        digests: Digests,
    ) -> None:
        self.identity: StorageWeakRef | None = None
        if not chain.once:
            self.identity = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.version = tensor._version
        self.unread = 0
        self.given: list[tuple[torch.Tensor, int]] = []
        self.skipped_bytes = 0
        self.here: torch.Tensor | None = None
        self._reader: Any = None
        self._chain = chain
        self._sources = sources
        self._versions = versions
        self._digest: torch.Tensor | None = None
        if digests.compares(chain.value):
            with unseen():
                self._digest = digest(_whole(tensor))
        self._digests = digests

    def take(self) -> torch.Tensor:
        """Give the value, as the op made it, running the ops now unless they were run already.

        Raises
        ------
        StaleValueError
            If an input was changed in place since.
        ReplayError
            If the replay gave other bytes; while backward runs, it is raised at its end or, where
            that is not waited for, at the end of the next one.
        """
        if self.here is None:
            with unseen():
                self.here = self._replay()
            self._reader = current_stream(self.here.device)
            return self.here
        reader = current_stream(self.here.device)
        if reader is not None and reader != self._reader:
            reader.wait_stream(self._reader)
            self.here.record_stream(reader)
        return self.here

    @property
    def shared(self) -> bool:
        """Whether another reader would get the same bytes."""
        return self.here is not None

    def let_go(self) -> None:
        """Drop the bytes; another read makes them again."""
        self.here = None
        self.given.clear()

    def _replay(self) -> torch.Tensor:
        chain, source_of = self._chain, self._sources.get
        made: dict[int, torch.Tensor] = {}

        def tensor_of(operand: Operand) -> torch.Tensor:
            tensor = made.get(operand.value)
            if tensor is None:
                source = source_of(operand.value)
                if source is not None:
                    return source(operand.geometry)
                tensor = self._owned(operand.value)
            geometry = operand.geometry
            return tensor if geometry.is_of(tensor) else geometry.beside(tensor)

        for step, spent in zip(chain.recipes, chain.spent, strict=True):
            made.update(zip(step.outputs, step.run(tensor_of), strict=True))
            for other in spent:
                made.pop(other, None)
        value = made[chain.value]
        nbytes = value.untyped_storage().nbytes()
        if nbytes != chain.nbytes:
            raise ReplayError(
                f"{chain.nbytes} bytes were to be made again, and {nbytes} were, by "
                f"{chain.made_by}: the program computes something else than when it was observed"
            )
        if self._digest is not None:
            self._digests.compare(self._digest, digest(_whole(value)), chain.made_by)
        return value

    def _owned(self, value: int) -> torch.Tensor:
        tensor = _alive(self._chain.owned[value])
        if tensor._version != self._versions[value]:
            self._digests.refute(
                "a parameter or buffer was changed in place between forward and backward, and "
                "bytes that forward saved were to be made again from it"
            )
        return tensor


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return content_of(tensor, 0, tensor.untyped_storage().nbytes())


def _alive(owner: weakref.ref[torch.Tensor]) -> torch.Tensor:
    tensor = owner()
    if tensor is None:
        raise ReplayError("a parameter that a replay needs is gone")
    return tensor
