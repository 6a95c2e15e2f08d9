"""Following the calls of a planned iteration, and doing without hooks where nothing is to be done.

A hook in Python costs a save more than most saves are worth to a plan, twice: when it is packed and
when it is read. What a call saves is known from the iteration observed. Where the plan keeps all of
it, and nothing waits for it to be saved or read, autograd saves it by itself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from belady.eager.hooks import HookPair
from belady.eager.replay import Recipes
from belady.eager.table import Action, Entry
from belady.ir.plan import Encode, Plan, Recompute
from belady.ir.replay import COMPARED_ONE_IN
from belady.measure.arguments import is_alike, numbers_of
from belady.measure.calls import Call, Calls, in_backward

# Decisions that give back what the program saved when it was observed, and nothing else.
TRUSTING = (Recompute, Encode)

_NO_KWARGS: dict[str, Any] = {}
_HOOKED = -1
_NOTHING = None, _HOOKED
Name = tuple[int, int]  # of a call: its pass, and its number in it


class Step(NamedTuple):
    """What is known of a call, and the ordinal of the first save after it where it needs no hooks.

    Else that is -1.
    """

    call: Call
    past: int


class Hooks(NamedTuple):
    """Those of a pass, and what is told the ordinal of the next save once they were off."""

    pair: HookPair
    go_on_from: Callable[[int], None]


class Follower(Calls):
    """Compares the calls of an iteration with those of one before.

    Parameters
    ----------
    passes
        What is known of the calls of each pass.
    expected
        The calls that were not trusted: nothing that is replayed has their numbers in it.
    varying
        Where calls are added whose numbers change, for the next observation.

    Attributes
    ----------
    strayed
        Whether the iteration under way has called something else so far.
    """

    def __init__(
        self, passes: list[list[Step]], expected: frozenset[Name], varying: set[Name]
    ) -> None:
        super().__init__()
        self.strayed = False
        self._passes = passes
        self._varying = varying
        self._expected = expected
        self._known: list[Step] = []
        self._next = self._iteration = 0
        self._looks = False
        self._hooks: Hooks | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # As `Calls` has it, and nothing is to be done when the call returns: this is what every
        # call of a planned forward costs.
        if not self.aside and in_backward() == -1:
            past = self._follow(func, args, kwargs or _NO_KWARGS)
            # Once it has strayed, every save is compared.
            hooks = None if past < 0 or self.strayed else self._hooks
            if hooks is not None and hooks.pair.lift():
                try:
                    return func(*args, **kwargs) if kwargs else func(*args)
                finally:
                    hooks.pair.push()
                    # Also after an error: what follows has the ordinals that were observed.
                    hooks.go_on_from(past)
        return func(*args, **kwargs) if kwargs else func(*args)

    def start_iteration(self, *, missed: bool) -> None:
        """An iteration begins; the last one had a save that did not match if ``missed``."""
        self.strayed = False
        self._iteration += 1
        self._looks = missed or self._iteration % COMPARED_ONE_IN == 0

    def enter_pass(self, pass_index: int) -> None:
        """See `Calls.enter_pass`."""
        self._known = self._passes[pass_index] if pass_index < len(self._passes) else []
        self._next = 0
        super().enter_pass(pass_index)

    def leave_pass(self) -> None:
        """See `Calls.leave_pass`."""
        self._hooks = None
        super().leave_pass()

    def may_lift(self, pair: HookPair, go_on_from: Callable[[int], None]) -> bool:
        """Let ``pair`` be off during calls of this pass that do not need it; whether it may be.

        Not in one of `COMPARED_ONE_IN` iterations, and not after one in which a save was another:
        no call shows shapes, and where all is kept nothing else would.

        Parameters
        ----------
        go_on_from
            Called with the ordinal of the next save after such a call.
        """
        if not self._looks:
            self._hooks = Hooks(pair, go_on_from)
        return not self._looks

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """A call is about to be made; gives `Step.past` of it, -1 once the program has strayed."""
        index = self._next
        if index < 0:
            return _HOOKED
        self._next = index + 1
        call, past = self._known[index] if index < len(self._known) else _NOTHING
        if call is None or (call.func is not func and call.func != func):
            # From here on nothing says which call is which.
            self.strayed, self._next = True, -1
            return _HOOKED
        given = (*args, *kwargs, *kwargs.values()) if kwargs else args
        if call.alike is not None and is_alike(call.alike, given):
            return past
        if call.numbers not in (None, numbers_of(args, kwargs)):
            name = (self._pass, index)
            self._varying.add(name)
            self.strayed |= name not in self._expected
        return past


def following(
    plan: Plan,
    recipes: Recipes,
    tables: Sequence[Sequence[Entry | None]],
    due: Sequence[Action],
) -> Follower | None:
    """Follows iterations under ``plan``, where it trusts in their calls and those are known.

    Parameters
    ----------
    tables
        What is expected of every save: one table a pass, by ordinal.
    due
        What is to be done.
    """
    trusts = any(isinstance(it, TRUSTING) for it in plan.decisions.values())
    if not recipes.calls or not trusts:
        return None
    lifted = _lifted(recipes, tables, sorted({action.boundary for action in due}))
    passes = [
        [Step(call, lifted.get((index, at), _HOOKED)) for at, call in enumerate(calls)]
        for index, calls in enumerate(recipes.calls)
    ]
    return Follower(passes, recipes.expected, recipes.varying)


def _lifted(
    recipes: Recipes, tables: Sequence[Sequence[Entry | None]], due: Sequence[int]
) -> dict[Name, int]:
    """Calls that need no hooks, and the ordinal of the first save after each.

    All that one saves is kept as it is, and its saves and reads are not the first at which the
    engine gets control once something is due.
    """
    entries = [entry for table in tables for entry in table if entry is not None]
    reads = sorted({entry.read for entry in entries if entry.read >= 0})
    waits = (bisect_left(reads, boundary) for boundary in due)
    awaited = {reads[at] for at in waits if at < len(reads)}
    found, reached = dict[Name, int](), -1
    for index, (calls, table) in enumerate(zip(recipes.calls, tables, strict=False)):
        past = 0
        for at, call in enumerate(calls):
            first, stop = call.saves
            reached = _reached(table[past:first], reached)
            past, before, saved = stop, reached, table[first:stop]
            reached = _reached(saved, reached)
            waited_for = bisect_right(due, before) < bisect_right(due, reached)
            if saved and not waited_for and all(_by_itself(it, awaited) for it in saved):
                found[index, at] = stop
        reached = _reached(table[past:], reached)
    return found


def _reached(saved: Sequence[Entry | None], reached: int) -> int:
    return max((entry.due for entry in saved if entry is not None), default=reached)


def _by_itself(entry: Entry | None, awaited: set[int]) -> bool:
    """Whether autograd may save it by itself; what no plan knows it may."""
    return entry is None or (entry.plain and entry.read not in awaited)
