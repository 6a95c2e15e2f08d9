"""Puts the coordinated order in force: for Layrub's policies always, for `auto` where it must."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from belady.eager.limits import foreseen, refuse_infeasible
from belady.errors import InfeasibleBudgetError
from belady.ir.hardware import HardwareProfile
from belady.ir.trace import Trace
from belady.measure.stages import Policy
from belady.ordered.told import BY_NEED, BY_POLICY, said
from belady.ordered.wrap import ordered
from belady.planners import traits_of
from belady.planners.traits import Coordinated


class Ordering:
    """The modules whose layers go backward in the coordinated order.

    Attributes
    ----------
    said
        What a user should know of it, one sentence.
    judged
        The static trace of the call that was answered last, in that order; None if there is none.
    """

    def __init__(self, policy: Policy, hardware: HardwareProfile) -> None:
        self.said: list[str] = []
        self.judged: Trace | None = None
        self._policy = policy
        self._order = traits_of(policy.name).coordinated
        self._hardware = hardware
        self._undo: dict[nn.Module, Callable[[], None]] = {}

    def begin(self, roots: Iterable[nn.Module]) -> None:
        """Order the layers of the roots if the policy always does."""
        if self._order is Coordinated.ALWAYS:
            for root in roots:
                self._put(root, BY_POLICY)

    def answer(
        self, refusal: InfeasibleBudgetError, module: nn.Module, call: tuple[Any, Any], taken: int
    ) -> InfeasibleBudgetError | None:
        """Order the layers of ``module``, of which a call was refused, if it fits then.

        Parameters
        ----------
        taken
            See `belady.eager.limits.foreseen`.

        Returns
        -------
        InfeasibleBudgetError or None
            What there is to say if it does not; then all layers run as before.
        """
        if self._order is not Coordinated.AS_NEEDED or module in self._undo:
            return refusal
        self._put(module, BY_NEED)
        try:
            self.judged = foreseen(module, call, taken)
            if self.judged is not None:
                refuse_infeasible(self.judged, self._hardware, self._policy)
        except InfeasibleBudgetError as error:
            self.release(module)
            # A traceback keeps the frames of all callers, and with them the user's tensors.
            return min(refusal, error.with_traceback(None), key=lambda it: it.smallest_bytes)
        return None

    @contextmanager
    def given_up(self, module: nn.Module) -> Iterator[Callable[[], None]]:
        """Let the layers of ``module`` run as they were made, unless the body raises.

        What it is given does the same as an error.
        """
        before = self._undo.get(module), self.said

        def put_back() -> None:
            if before[0] is not None:
                self._undo[module], self.said = ordered(module), before[1]

        self.release(module)
        try:
            yield put_back
        except BaseException:
            put_back()
            raise

    def release(self, module: nn.Module) -> None:
        """Let the layers of ``module`` run as they were made."""
        if module in self._undo:
            self._undo.pop(module)()
            self.said = self.said if self._undo else []

    def close(self) -> None:
        """Let all layers run as they were made; what was said of them stays."""
        while self._undo:
            self._undo.popitem()[1]()

    def _put(self, module: nn.Module, why: str) -> None:
        if module not in self._undo:
            self._undo[module] = ordered(module)
            self.said = [said(why)]
