"""Carries out a plan: every save looked up in a table, every copy issued where the plan says.

The engine gets control at saves (forward) and reads (backward) only. Each of them stands at a
known boundary of the trace, so at each it issues what the plan wants at or before that boundary.
No other work is done while an iteration runs.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Container
from functools import partial
from time import perf_counter
from typing import Any

import torch

from belady.eager.content import Kept
from belady.eager.digests import Digests
from belady.eager.following import TRUSTING, following
from belady.eager.handles import PlannedAgain, PlannedKept, PlannedSaved, is_of
from belady.eager.hooks import HookPair, outer_pair
from belady.eager.replay import Recipes, Recomputed, Source, chains
from belady.eager.table import FREE, OUT, Action, Entry, actions, matches, reads, tables, tiers
from belady.errors import PlanMismatchError
from belady.ir.plan import Encode, Managed, Plan, Recompute
from belady.ir.trace import Trace
from belady.memory.carrier import Carrier
from belady.memory.contents import Moved, Packed, Paged
from belady.memory.geometry import movable
from belady.memory.witness import demand_unchanged

_NO_RECIPES = Recipes()
_NEVER = sys.maxsize


class Planned:
    """Pack and unpack hooks that carry out ``plan`` on iterations that repeat ``trace``.

    Parameters
    ----------
    persistent
        Addresses of the storages of parameters and buffers.
    recipes
        How to run ops again, for plans that recompute.
    fallback
        Saves what cannot be recomputed after all.

    Attributes
    ----------
    defaults, missed
        Saves that were kept because they did not match the plan, by reason; and how many were in
        the iteration under way.
    host_seconds
        What taking values over, copying them and bringing them back has cost the host in the
        iteration under way; ``replay_seconds`` of them for what stays or is made again.
    on_bring
        Called with a content whose bytes have just been asked back or encoded (for measuring).
    on_anchor
        Called with the boundary at which the engine gets control (for measuring).
    calls
        Follows the calls of the program, where the plan recomputes.
    digests
        How the replays came out.

    Raises
    ------
    PlanMismatchError
        If ``plan`` was made for another trace.
    """

    def __init__(
        self,
        trace: Trace,
        plan: Plan,
        carrier: Carrier,
        persistent: Container[int],
        recipes: Recipes = _NO_RECIPES,
        fallback: Callable[[torch.Tensor], Any] = Kept,
        digests: Digests | None = None,
    ) -> None:
        if plan.trace != trace.fingerprint:
            raise PlanMismatchError(f"the plan is for trace {plan.trace}, not {trace.fingerprint}")
        self._carrier, self._device = carrier, carrier.device
        self._actions, self._chains = actions(trace, plan), chains(trace, plan, recipes)
        self._persistent, self._fallback = persistent, fallback
        self.digests = digests or Digests()
        self._needed = {value for chain in self._chains.values() for value in chain.saved}
        self._tables = tables(trace, plan, self._needed)
        self.calls = following(plan, recipes, self._tables, self._actions)
        self._tiers, self._reads = tiers(plan), reads(trace, plan)
        self.defaults: Counter[str] = Counter()
        self._iteration = self.missed = 0
        self.on_bring: Callable[[Moved | Packed], None] | None = None
        self.on_anchor: Callable[[int], None] | None = None
        self.start_iteration()

    def start_iteration(self) -> None:
        """Forget the iteration before; what its graphs still hold stays valid."""
        self._live: dict[int, weakref.ref[Moved | Packed | Recomputed]] = {}
        self._inputs: dict[int, weakref.ref[PlannedSaved | PlannedKept]] = {}
        self._move_to(0)
        self.digests.start_iteration()
        if self.calls is not None:
            self.calls.start_iteration(missed=self.missed > 0)
        self._table: list[Entry | None] = []
        self._ordinal = 0
        self._iteration += 1
        self.missed = 0
        self.host_seconds = self.replay_seconds = 0.0

    def enter_pass(self, index: int) -> None:
        """The saves that follow belong to pass ``index``."""
        self._table = self._tables[index] if index < len(self._tables) else []
        self._ordinal = 0

    def may_lift(self, pair: HookPair) -> bool:
        """Have the hooks ``pair`` of this pass off while nothing needs them, if that may be."""
        if self.calls is None or self.on_anchor is not None or outer_pair() is not None:
            return False
        return self.calls.may_lift(pair, partial(setattr, self, "_ordinal"))

    def finish_iteration(self) -> None:
        """Send out what is still due; what backward did not ask for stays out."""
        due = self._actions[self._cursor :]
        self._move_to(len(self._actions))
        for action in due:
            if action.step in (OUT, FREE):
                self._act(action)
        self.digests.finish_iteration()

    def pack(self, tensor: torch.Tensor) -> Any:
        """Save ``tensor``: the pack hook.

        Most saves of most plans are kept. What happens here happens to each of them, so that way is
        short: no object of ours, and no more of the geometry compared than tells programs apart.
        """
        ordinal = self._ordinal
        self._ordinal = ordinal + 1
        table = self._table
        entry = table[ordinal] if ordinal < len(table) else None
        if (
            entry is None
            or not entry.plain
            or entry.due >= self._due
            or tensor.is_nested
            or tensor.shape != entry.shape
            or self.on_anchor is not None
        ):
            return self._pack(tensor, entry)
        kept = tensor.detach()
        return kept, kept._version, entry.read, self._iteration

    def unpack(self, handle: Any) -> torch.Tensor:
        """Give a saved tensor back: the unpack hook."""
        if type(handle) is tuple:
            tensor: torch.Tensor
            tensor, version, read, iteration = handle
            if read >= self._due or self.on_anchor is not None:
                self._reads_at(read, iteration)
            demand_unchanged(tensor, version)
            return tensor
        self._reads_at(handle.read, handle.iteration)
        return handle.take()  # type: ignore[no-any-return]

    def _reads_at(self, boundary: int, iteration: int) -> None:
        # A graph of an earlier iteration may be read late: its boundaries say nothing of this one.
        if boundary < 0 or iteration != self._iteration:
            return
        if self.on_anchor is not None:
            self.on_anchor(boundary)
        self._advance(boundary)

    def _pack(self, tensor: torch.Tensor, entry: Entry | None) -> Any:
        if entry is None and not movable(tensor, self._device):
            # Not in any trace either: another device (a generator's state), sparse, a subclass.
            return PlannedKept(tensor, -1, 0)
        if entry is None or not matches(tensor, entry):
            self._default("save not in the plan")
            return PlannedKept(tensor, -1, 0)
        if self.on_anchor is not None:
            self.on_anchor(entry.boundary)
        if self.calls is not None and self.calls.strayed and type(entry.decision) in TRUSTING:
            self._default("the program calls something else, or with other numbers, than observed")
            return self._fallback(tensor)
        managed = None if entry.decision is None else self._managed(tensor, entry)
        iteration = self._iteration
        handle = PlannedKept(tensor, entry.read, iteration) if managed is None else managed
        if entry.value in self._needed:
            self._inputs[entry.value] = weakref.ref(handle)
        self._advance(entry.due)
        return handle

    def _managed(self, tensor: torch.Tensor, entry: Entry) -> PlannedSaved | None:
        begun = perf_counter()
        content = self._content(tensor, entry)
        made = None
        if content is not None:
            handle = PlannedAgain if type(content) is Recomputed else PlannedSaved
            geometry = None if tensor.is_conj() or tensor.is_neg() else entry.geometry
            made = handle(tensor, content, geometry, entry.read, self._iteration)
        spent = perf_counter() - begun
        self.host_seconds += spent
        if not isinstance(content, Moved):
            self.replay_seconds += spent
        return made

    def _default(self, reason: str) -> None:
        """The one safe default is to keep: count it."""
        self.defaults[reason] += 1
        self.missed += 1

    def _content(self, tensor: torch.Tensor, entry: Entry) -> Moved | Packed | Recomputed | None:
        known = self._live.get(entry.value)
        content = known() if known is not None else None
        if content is not None:
            # The content's weak reference keeps the address from being used again.
            if is_of(content, tensor):
                return content
            self._default("saved again from another storage, version or type")
            return None
        if tensor.untyped_storage()._cdata in self._persistent or not movable(tensor, self._device):
            self._default("cannot be moved")
            return None
        content = self._make(tensor, entry)
        if content is not None:
            content.unread = self._reads[entry.value]
            self._live[entry.value] = weakref.ref(content)
        return content

    def _make(self, tensor: torch.Tensor, entry: Entry) -> Moved | Packed | Recomputed | None:
        if isinstance(entry.decision, Recompute):
            return self._recomputed(tensor, entry)
        if isinstance(entry.decision, Encode):
            packed = Packed.of(tensor, entry.decision.codec)
            if packed is None:
                self._default("its bytes are not whole elements")
            elif self.on_bring is not None:
                self.on_bring(packed)
            return packed
        moved: Moved
        if isinstance(entry.decision, Managed):
            moved = Paged(tensor, self._carrier, entry.decision)
        else:
            moved = Moved(tensor, 0, tensor.untyped_storage().nbytes(), self._carrier)
        moved.label = entry.value
        return moved

    def _recomputed(self, tensor: torch.Tensor, entry: Entry) -> Recomputed | None:
        chain = self._chains[entry.value]
        versions: dict[int, int] = {}
        for value, known in chain.owned.items():
            owner = known()
            if owner is None or owner.untyped_storage()._cdata not in self._persistent:
                # Replaced since it was observed: by another parameter, or by other bytes.
                self._default("a parameter that its replay needs was replaced")
                return None
            versions[value] = owner._version
        sources: dict[int, Source] = {}
        for value in chain.saved:
            source = self._inputs.get(value)
            handle = source() if source is not None else None
            if handle is None:
                self._default("what its replay needs is not saved")
                return None
            sources[value] = handle.laid_out
        return Recomputed(tensor, chain, versions, sources, self.digests)

    def _advance(self, boundary: int) -> None:
        while boundary >= self._due:
            action = self._actions[self._cursor]
            # Before the action: should it raise, the next event must not repeat it.
            self._move_to(self._cursor + 1)
            self._act(action)

    def _move_to(self, cursor: int) -> None:
        self._cursor = cursor
        rest = cursor < len(self._actions)
        self._due = self._actions[cursor].boundary if rest else _NEVER

    def _act(self, action: Action) -> None:
        known = self._live.get(action.value)
        content = known() if known is not None else None
        if isinstance(content, Recomputed):
            # For a replay that starts from it; without this, long chains would be deep recursions.
            content.take()
        if not isinstance(content, Moved):
            return
        begun = perf_counter()
        if action.step == OUT:
            content.send(self._tiers[action.value])
        elif action.step == FREE:
            content.free()
        else:
            content.bring()
            if self.on_bring is not None:
                self.on_bring(content)
        self.host_seconds += perf_counter() - begun
