"""Turns what torch calls back (roots, optimizer steps) into passes and iterations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from belady.eager.conductor import Conductor
from belady.eager.iteration import Iteration
from belady.eager.key import Key, pass_key
from belady.eager.kinds import Stage
from belady.measure.monitor import Sample

Call = tuple[Any, Any]


class Tracker:
    """Follows the roots of one `VirtualMemory` through passes and iterations.

    Parameters
    ----------
    prepare
        Makes the conductor; called with the root and ``(args, kwargs)`` of the first pass of all.
    ended
        Called after every iteration with its stage and measurement.
    """

    def __init__(
        self,
        prepare: Callable[[torch.nn.Module, Call], Conductor],
        ended: Callable[[Stage, Sample], None],
    ) -> None:
        self.roots: list[torch.nn.Module] = []
        self.conductor: Conductor | None = None
        self._prepare = prepare
        self._ended = ended
        self._handles: list[Any] = [
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ended),
        ]
        self._iteration: Iteration | None = None
        self._inside: torch.nn.Module | None = None
        self._preparing = False
        self._whole = False
        self._stepped = False

    def add(self, module: torch.nn.Module) -> bool:
        """Follow ``module`` from its next call on; False when it is followed already."""
        if any(module is root for root in self.roots):
            return False
        self.roots.append(module)
        self._handles += [
            module.register_forward_pre_hook(self.enter, with_kwargs=True),
            module.register_forward_hook(self._leave, always_call=True),
        ]
        return True

    def close(self) -> None:
        """Take all hooks off and forget the iteration under way."""
        self._abort()
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Make the block one iteration, managed from the first call of a root to its end.

        Raises
        ------
        RuntimeError
            If it is entered inside itself or inside a forward.
        """
        if self._whole or self._inside is not None:
            raise RuntimeError("vm.iteration() cannot be entered inside itself or inside a forward")
        self._abort()
        self._whole = True
        try:
            yield
            self._inside = None
            if self._iteration is not None:
                self._iteration.leave()
            self._finish()
        finally:
            self._whole = False
            self._abort()

    def enter(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Root ``module`` is called."""
        if self._preparing or not torch.is_grad_enabled():
            return
        if self._inside is not None and (self._whole or self._inside is not module):
            return
        if self._inside is module:
            # The last call ended in a way that ran no hook (KeyboardInterrupt): start afresh.
            self._abort()
        call = (args, kwargs)
        conductor = self.conductor or self._prepared(module, call)
        root = next(index for index, known in enumerate(self.roots) if known is module)
        key = pass_key(root, module, call, conductor.carrier.device)
        if self._iteration is not None and self._is_over(self._iteration, key):
            self._finish()
        if self._iteration is None:
            self._iteration = conductor.start(key)
        self._inside = module
        self._iteration.enter(key, module, call)

    def _prepared(self, module: torch.nn.Module, call: Call) -> Conductor:
        # Preparing traces the pass by calling the module on tensors without bytes.
        self._preparing = True
        try:
            self.conductor = self._prepare(module, call)
        finally:
            self._preparing = False
        return self.conductor

    def _leave(self, module: torch.nn.Module, _args: Any, result: Any) -> None:
        if module is not self._inside or self._preparing or self._whole:
            return
        self._inside = None
        if result is None:
            # What torch gives after an exception in forward.
            self._abort()
        elif self._iteration is not None:
            self._iteration.leave()

    def _optimizer_begins(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._iteration is not None:
            self._iteration.optimizer_begins()

    def _optimizer_ended(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._iteration is None or not self._owns(optimizer):
            return
        self._stepped = True
        self._iteration.optimizer = optimizer
        if not self._whole and self._inside is None:
            self._finish()

    def _is_over(self, iteration: Iteration, key: Key) -> bool:
        """Whether the iteration under way ended without any optimizer (a hand-written update).

        As long as no optimizer was ever seen, a pass of the kind that the last one had is taken
        for a new iteration.
        """
        passes = iteration.passes
        return not self._stepped and not self._whole and bool(passes) and passes[-1] == key

    def _owns(self, optimizer: torch.optim.Optimizer) -> bool:
        ours = {id(p) for root in self.roots for p in root.parameters()}
        return any(id(p) in ours for group in optimizer.param_groups for p in group["params"])

    def _finish(self) -> None:
        iteration, self._iteration = self._iteration, None
        if iteration is None or self.conductor is None or not iteration.passes:
            return
        self._ended(*self.conductor.finish(iteration))

    def _abort(self) -> None:
        self._inside = None
        iteration, self._iteration = self._iteration, None
        if iteration is not None:
            iteration.abort()
