"""Runs modules in slices where a single op is over the budget, before anything has run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter

import torch
from torch import nn

from belady.errors import InfeasibleBudgetError
from belady.ir.hardware import HardwareProfile
from belady.ir.trace import Trace
from belady.measure.held import missing_state, state_bytes
from belady.measure.key import Key
from belady.measure.stages import Policy
from belady.planners import traits_of
from belady.planners.least import least_of
from belady.planners.places import Sections
from belady.planners.sectioning import over_budget
from belady.planners.workspace import with_workspaces
from belady.sections.candidate import ALONGS, Call, Candidate
from belady.sections.choice import COPIES, Beside, Chosen, Room
from belady.sections.gate import Gate
from belady.sections.in_force import WHOLE, Decided, InForce, Related, flags_of, sentence
from belady.sections.searching import Searching
from belady.sections.wrap import wrap
from belady.units import format_bytes, format_seconds

_log = logging.getLogger("belady")

# Kinds of calls of a root that are remembered.
_KINDS = 64

# Puts sections of a model in force, where it is asked for them, until it is undone.
Put = Callable[[nn.Module, Sections, Callable[[], bool]], Callable[[], None]]
Choose = Callable[[], Chosen | None]


class Cutting:
    """The sections of each kind of call, and those in force.

    Parameters
    ----------
    put
        How the engine runs them.
    alongs
        Dimensions along which it can.

    Attributes
    ----------
    gate
        To be opened for a pass, and shut after it: only then are sections in force.
    refused
        Why modules of the call judged last may not be cut, one sentence each.
    least_bytes
        A budget in which slices of the call judged last would do, where `cut` was to find it.
    held_bytes
        What an optimizer, or others, are known to hold throughout, where whoever asks knows it.
    """

    def __init__(
        self,
        policy: Policy,
        hardware: HardwareProfile,
        device: torch.device,
        put: Put = wrap,
        alongs: Sequence[int] = ALONGS,
    ) -> None:
        self._put = put
        self._alongs = alongs
        self.gate = Gate()
        self.refused: tuple[str, ...] = ()
        self.least_bytes: int | None = None
        self.held_bytes = 0
        self._policy = policy
        self._least = least_of(policy.name, hardware, policy.budget)
        self._device = device
        self._known: dict[nn.Module, dict[Key, Decided]] = {}
        self._undo: dict[nn.Module, InForce] = {}
        self._said: dict[int, list[str]] = {}
        self._must: dict[Key, InfeasibleBudgetError] = {}
        self._related = Related()
        self._searching = Searching(self._least, device)
        self._room = Room(policy.budget.device_bytes)

    @property
    def said(self) -> list[str]:
        """What a user should know of the sections in force, or last in force, one sentence each."""
        return [sentence for sentences in self._said.values() for sentence in sentences]

    def __contains__(self, module: nn.Module) -> bool:
        return any(it.sections for it in self._known.get(module, {}).values())

    def leaves_bytes(self, key: Key, module: nn.Module) -> int:
        """What convolutions of such a call are to leave of the budget, as they did when timed."""
        known, budget = self._known.get(module, {}).get(key), self._policy.budget.device_bytes
        room = self._least.hardware.allocator.peak_within(int(self._room.allowed * budget))
        return budget - room if known is not None and known.raced else 0

    def is_cut(self, key: Key, module: nn.Module) -> bool:
        """Whether calls of a kind run in slices."""
        known = self._known.get(module, {}).get(key)
        return known is not None and bool(known.sections)

    def holds(self, key: Key, module: nn.Module) -> bool:
        """Put in force what was decided for a call; False if that is not known, or no longer holds.

        What may be cut in one kind of call (in eval mode, of so many samples) may not in another.
        """
        self._make_way(module)
        if module not in self:
            return True
        known = self._known[module].get(key)
        if known is None or known.flags != flags_of(module, known.sections):
            return False
        if known.sections != self._undo.get(module, WHOLE).sections:
            self._release(module)
            self._wrap(module, known.sections)
        return True

    def begin(self, key: Key, module: nn.Module) -> None:
        """Let the modules of a call that is to be judged run whole."""
        self._make_way(module)
        self._release(module)
        self.refused, self.least_bytes = (), None
        known = self._known.setdefault(module, {})
        known[key] = Decided((), ())
        if len(known) > _KINDS:
            # Judged anew if it comes again.
            known.pop(next((it for it in known if not known[it].sections), key))

    def refusal(self, key: Key) -> InfeasibleBudgetError | None:
        """What was said of a kind of call that fits by its static trace, but did not; once."""
        return self._must.pop(key, None)

    def forget_whole(self, key: Key, module: nn.Module) -> None:
        """Judge all other kinds of calls anew that run whole: the order of their layers is gone."""
        known = self._known.get(module, {})
        self._known[module] = {it: known[it] for it in known if it == key or known[it].sections}

    def cut(self, key: Key, module: nn.Module, call: Call, whole: int = 0) -> bool:
        """Run modules of ``module`` in slices so that a call can fit; False if none will do.

        Each section is tried on random numbers first, on the real modules, in a few samples.

        Parameters
        ----------
        whole
            A budget in which the call fits as it is: where no slices do in that given, one between
            is looked for in which they would.
        """
        if (found := self._candidate(module, call)) is None:
            return False
        race = self._searching.race(found, whole=False)
        searches = self._searching.in_turn(found) if race is None else [race.search]
        choose = partial(self._beside.chosen, searches, found.trace, COPIES, race)
        if self._cut(key, found, choose, raced=race is not None):
            return True
        if whole:
            # By the last, which asks for least.
            self.least_bytes = self._beside.least_bytes(searches[-1], found.trace, whole)
        return False

    def cut_for_workspaces(
        self, key: Key, module: nn.Module, call: Call, copies: Sequence[int] = COPIES
    ) -> bool:
        """As `cut`, of a call that fits but for workspaces; False also where it is faster whole."""
        if (found := self._candidate(module, call)) is None:
            return False
        search = self._searching.beside(found, self._searching.share(module, call))
        race, beside = self._searching.race(found, whole=True), self._beside
        if race is None:
            beside = beside.in_few()
        choose = partial(beside.chosen, [search], found.trace, copies, race)
        return self._cut(key, found, choose, raced=race is not None)

    def _candidate(self, module: nn.Module, call: Call) -> Candidate | None:
        return Candidate.of(module, call, self._device, self._alongs) if self.may_cut else None

    def make_room(self, key: Key, module: nn.Module, call: Call, trace: Trace) -> None:
        """Cut modules of a call that `lacks_workspaces`; ``trace`` is static, of this call."""
        if self.lacks_workspaces(module, call, trace):
            self.cut_for_workspaces(key, module, call, COPIES[1:2])

    def lacks_workspaces(self, module: nn.Module, call: Call, trace: Trace | None) -> bool:
        """Whether a call that may be cut does not fit beside what a library will ask for.

        That is known where an iteration was cut anew for it, and else estimated.
        """
        if trace is None or not self.may_cut:
            return False
        asking = with_workspaces(trace, self._searching.share(module, call))
        # Nothing is lost between blocks of what is there already.
        allocator = replace(self._least.hardware.allocator, settled_bytes=state_bytes(trace))
        hardware = replace(self._least.hardware, allocator=allocator)
        allowed, budget = self._room.allowed, self._policy.budget.device_bytes
        may_lack = asking != trace or allowed < 1.0
        # An optimizer that keeps nothing is rare, and what is not there yet is in no static trace.
        state = missing_state(trace, 1) if allowed == 1.0 else 0
        needed, _ = replace(self._least, hardware=hardware).needed(asking)
        return may_lack and needed + state > int(allowed * budget)

    def unsuited(self, module: nn.Module, trace: Trace) -> bool:
        """Forget the sections of ``module`` if they are too coarse, or finer than they must be.

        Parameters
        ----------
        trace
            As observed, with the workspaces and the optimizer's state that there are.
        """
        return module in self and (self._lacks(module, trace) or self._spares(module, trace))

    def too_large(
        self, module: nn.Module, keys: Sequence[Key], trace: Trace, error: InfeasibleBudgetError
    ) -> bool:
        """Whether calls of ``module``, observed whole and refused with ``error``, may be cut."""
        cut = any(self.is_cut(key, module) for key in keys)
        if cut or not self.may_cut or not self._lacks(module, trace):
            return False
        # A traceback keeps the frames of all callers, and with them the user's tensors.
        self._must.update(dict.fromkeys(keys, error.with_traceback(None)))
        return True

    def close(self) -> None:
        """Let all modules run as they did."""
        for module in list(self._undo):
            self._release(module)
        self._known.clear()
        self._must.clear()

    @property
    def may_cut(self) -> bool:
        """Whether the policy cuts modules at all."""
        return not self._policy.exact and traits_of(self._policy.name).slices_modules

    def _lacks(self, module: nn.Module, trace: Trace) -> bool:
        lacks = self._room.lacks(over_budget(trace, self._least))
        return lacks and self._forget(module)

    def _spares(self, module: nn.Module, trace: Trace) -> bool:
        left = [it.state_bytes for it in self._known[module].values() if it.sections]
        return self._room.spares(trace, min(left)) and self._forget(module)

    def _forget(self, module: nn.Module) -> bool:
        """Cut ``module`` anew, or for the first time, when it is called next."""
        self._release(module)
        self._known.pop(module, None)
        self._said.pop(id(module), None)
        return True

    def leave(self, over: int) -> None:
        """Leave room from now on for bytes that were ``over`` the budget all the same."""
        self._room.leave(over)

    @property
    def _beside(self) -> Beside:
        return self._room.beside(self._policy, self._least.hardware, self.held_bytes)

    def _cut(self, key: Key, call: Candidate, choose: Choose, *, raced: bool) -> bool:
        """Choose sections; the search takes seconds, in which the script says nothing."""
        size, room = len(call.trace.ops), format_bytes(self._policy.budget.device_bytes)
        _log.info("looking for slices in which a call of %d ops fits into %s", size, room)
        begun = perf_counter()
        chosen = choose()
        took = format_seconds(perf_counter() - begun)
        if chosen is None:
            self.refused = tuple(dict.fromkeys(call.refused.values()))
            _log.info("found none in %s", took)
            return False
        module, (sections, state) = call.module, chosen
        decided = Decided(sections, flags_of(module, sections), state, raced)
        self._known.setdefault(module, {})[key] = decided
        if not sections:
            _log.info("faster whole, seen in %s", took)
            return False
        _log.info("found slices in %s: %s", took, chosen)
        self._said[id(module)] = [sentence(section) for section in sections]
        self._wrap(module, sections)
        return True

    def _wrap(self, module: nn.Module, sections: Sections) -> None:
        if sections:
            undo = self._put(module, sections, partial(self.gate.lets, id(module)))
            self._undo[module] = InForce(sections, undo)

    def _make_way(self, module: nn.Module) -> None:
        """Release the sections of other roots that have modules of this one."""
        for other in [it for it in self._undo if it is not module]:
            if self._related(other, module):
                self._release(other)

    def _release(self, module: nn.Module) -> None:
        self._undo.pop(module, WHOLE).undo()
