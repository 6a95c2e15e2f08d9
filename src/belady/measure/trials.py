"""Learns of each op whether it can be run again to the same bits, by doing so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from belady.ir.trace import Replay
from belady.measure.calls import Learner
from belady.measure.clock import Clock
from belady.measure.recipes import Operand, Recipe, draft, reaches, repeats, shortcut
from belady.measure.records import tensors_in
from belady.memory.geometry import Geometry

ValueOf = Callable[[torch.Tensor], int]


class Trials:
    """Trials of one observed iteration.

    Parameters
    ----------
    learner
        Follows the calls of the program. What is issued outside of them, or with numbers that
        change, is not tried.
    clock
        Brackets runs that may be cheaper than the op; one of its own.

    Attributes
    ----------
    recipes
        How to run an op again, of those that gave the same bits.
    """

    def __init__(self, learner: Learner, clock: Clock) -> None:
        self.learner = learner
        self.recipes: dict[int, Recipe] = {}
        self._clock = clock
        self._runs = 0
        self._cheaper: dict[int, int] = {}  # number of the run by op

    def draft(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, value_of: ValueOf
    ) -> Recipe | None:
        """Recipe of a call that is about to be made; None if it is not to be tried."""
        return draft(func, args, kwargs, value_of) if self.learner.trusted else None

    def learn(
        self, op: int, recipe: Recipe, args: Any, kwargs: Any, result: Any, value_of: ValueOf
    ) -> None:
        """Try ``recipe`` on the call of op ``op`` that has just been made, with its ``result``."""
        outputs = list(tensors_in((result,)))
        short = shortcut(recipe, result, value_of)
        if short is not None:
            tensors = [*tensors_in((args, *kwargs.values())), *outputs]
            known = {Operand(value_of(it), Geometry.of(it)): it for it in tensors}
            self._runs += 1
            if reaches(partial(short.run, known.__getitem__), outputs[:1], self._clock):
                self.recipes[op] = short
                self._cheaper[op] = self._runs - 1
                return
        if repeats(recipe, args, kwargs, result):
            self.recipes[op] = replace(recipe, outputs=tuple(map(value_of, outputs)))

    def shortcuts(self) -> dict[int, Replay]:
        """What runs instead of an op when it is replayed, where that is cheaper than the op.

        Waits for the device.
        """
        timings = self._clock.results()
        found = {}
        for op, run in self._cheaper.items():
            recipe = self.recipes[op]
            reads = dict.fromkeys(operand.value for operand in recipe.operands())
            found[op] = Replay(timings[run][0], tuple(reads), recipe.outputs)
        return found
