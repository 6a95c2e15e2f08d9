"""Turns what torch calls back (roots, optimizer steps) into passes and iterations."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from belady.eager import hooks
from belady.eager.callbacks import Callback, Untraced
from belady.eager.conductor import Conductor
from belady.eager.iteration import Iteration
from belady.eager.unmanaged import why_plain
from belady.forwards import Late, is_patched
from belady.measure.calls import inside_compiled
from belady.measure.key import Key, pass_key
from belady.measure.monitor import Sample
from belady.measure.stages import Stage
from belady.measure.starving import tell
from belady.sections.gate import calls_under_way

Call = tuple[Any, Any]


class Tracker:
    """Follows the roots of one `VirtualMemory` through passes and iterations.

    Parameters
    ----------
    prepare
        Makes the conductor; called with the root of the first pass of all.
    ended
        Called after every iteration with its stage and measurement.
    cuts
        Whether the first call of a root may come to run another forward.
    """

    def __init__(
        self,
        prepare: Callable[[torch.nn.Module], Conductor],
        ended: Callable[[Stage, Sample], None],
        *,
        cuts: bool = False,
    ) -> None:
        self.roots: list[torch.nn.Module] = []
        self._cuts = cuts
        self._late: list[Late] = []
        self.conductor: Conductor | None = None
        self._prepare = prepare
        self._ended = ended
        self._handles: list[Any] = [
            register_optimizer_step_pre_hook(Untraced(self, "_optimizer_begins")),
            register_optimizer_step_post_hook(Untraced(self, "_optimizer_ended")),
        ]
        self._iteration: Iteration | None = None
        self._inside: torch.nn.Module | None = None
        self._preparing = False
        self._whole = False
        self._stepped = False
        self._over = False
        self._thread = 0
        # By optimizer, not by its address, at which another one may be made.
        self._owned = WeakKeyDictionary[torch.optim.Optimizer, tuple[Any, bool]]()
        self._plain: dict[str, None] = {}

    def add(self, module: torch.nn.Module) -> bool:
        """Follow ``module`` from its next call on; False when it is followed already."""
        if any(module is root for root in self.roots):
            return False
        self.roots.append(module)
        # What is compiled in place was looked up when it was traced.
        if self._cuts and not is_patched(module) and module._compiled_call_impl is None:
            self._late.append(Late(module))
            self._late[-1].attach()
        self._handles += [
            module.register_forward_pre_hook(Callback(self, "enter"), with_kwargs=True),
            module.register_forward_hook(Callback(self, "_leave"), always_call=True),
        ]
        return True

    @property
    def said(self) -> list[str]:
        """What a user should know where there is no plan, one sentence each."""
        return [*self._plain]

    def close(self) -> None:
        """Take all hooks off and forget the iteration under way."""
        try:
            self._abort()
        finally:
            for handle in self._handles:
                handle.remove()
            while self._late:
                self._late.pop().detach()

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
                self._iteration.leave(whole=True)
            self._finish()
        finally:
            self._whole = False
            self._abort()

    def enter(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Root ``module`` is called."""
        if self._ignored(module):
            return
        call = (args, kwargs)
        if not self._may_enter(module):
            self._enter_again(module, call)
            return
        if self.conductor is None:
            self.conductor = self._prepare(module)
        conductor = self.conductor
        root = next(index for index, known in enumerate(self.roots) if known is module)
        key = pass_key(root, module, call, conductor.carrier.device)
        if self._iteration is not None and (self._over or self._is_over(self._iteration, key)):
            self._finish()
        if self._iteration is None:
            self._thread = threading.get_ident()
            with self._by_itself():
                self._iteration = conductor.start(key, module, call)
            observation = self._iteration.observation
            if observation is not None and not self._whole:
                observation.on_interrupted = Callback(self, "_abort")
        else:
            with self._by_itself():
                conductor.enter(self._iteration, key, module, call)
        conductor.gate.open(module)
        self._inside = module
        self._iteration.enter(key, module, call)

    def _enter_again(self, module: torch.nn.Module, call: Call) -> None:
        """Another call of a root in an iteration that is one pass for the engine: `whole`."""
        if not self._whole or self._iteration is None or self.conductor is None:
            return
        if self.conductor.gate.is_open:
            return  # it is called by another root
        root = next(index for index, known in enumerate(self.roots) if known is module)
        key = pass_key(root, module, call, self.conductor.carrier.device)
        with self._by_itself():
            self.conductor.enter(self._iteration, key, module, call)
        self.conductor.gate.open(module)

    @contextmanager
    def _by_itself(self) -> Iterator[None]:
        """A new kind is traced by calling the module on tensors without bytes."""
        self._preparing = True
        try:
            yield
        except BaseException:
            self._abort()
            raise
        finally:
            self._preparing = False

    def call(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a call of root ``module`` that is under way and whose hooks were not there yet."""
        self.enter(module, args, kwargs)
        try:
            # Looked up now: entering may have put another in its place.
            result = module.forward(*args, **kwargs)
        except BaseException:
            self._leave(module, args, None)
            raise
        self._leave(module, args, result)
        return result

    def _ignored(self, module: torch.nn.Module) -> bool:
        """Whether this call is no pass: inference, tracing, replay, transform, capture, a copy."""
        if (
            self._preparing
            or not torch.is_grad_enabled()
            # Inside a backward: a user's checkpoint runs its function again.
            or torch._C._current_graph_task_id() != -1
            or not any(module is root for root in self.roots)
            # One iteration is one thread's; another thread runs unmanaged meanwhile.
            or (self._iteration is not None and self._thread != threading.get_ident())
        ):
            return True
        why = why_plain(module)
        if why:
            self._plain[why] = None
        return bool(why)

    def _may_enter(self, module: torch.nn.Module) -> bool:
        """Whether no other root is running; repairs what an interrupted one left behind."""
        if self._inside is None:
            return True
        if self._whole or calls_under_way(self._inside) > (self._inside is module):
            return False
        # The last call ended in a way that ran no hook (KeyboardInterrupt): start afresh.
        self._abort()
        return True

    def _leave(self, module: torch.nn.Module, _args: Any, result: Any) -> None:
        inside = module is self._inside or self._whole
        if not inside or self._preparing or calls_under_way(module) > 1:
            return
        if self.conductor is not None:
            self.conductor.gate.shut(module)
        if self._whole:
            return
        self._inside = None
        # What torch gives, from its handler, after an exception in forward.
        error = sys.exc_info()[1] if result is None else None
        if isinstance(error, torch.OutOfMemoryError):
            self.starved(error)
        elif error is not None:
            hooks.tell(error)
            self._abort()
        elif self._iteration is not None:
            self._iteration.leave()

    def _optimizer_begins(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._iteration is not None and self._owns(optimizer):
            self._iteration.optimizer_begins()

    def _optimizer_ended(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._iteration is None or self.conductor is None or not self._owns(optimizer):
            return
        self._stepped = True
        self.conductor.stepped(self._iteration, optimizer)
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward or self._thread != threading.get_ident() or inside_compiled():
            # A step for each parameter, out of backward, or a compiled one: the iteration ends
            # where the next begins.
            self._over = True
        elif not self._whole and self._inside is None:
            self._finish()

    def _is_over(self, iteration: Iteration, key: Key) -> bool:
        """Whether the iteration under way ended without any optimizer (a hand-written update).

        As long as no optimizer was ever seen, a pass of a kind that it already has is taken for
        a new iteration.
        """
        return not self._stepped and not self._whole and key in iteration.passes

    def _owns(self, optimizer: torch.optim.Optimizer) -> bool:
        known = (len(optimizer.param_groups), len(self.roots))
        if self._owned.get(optimizer, (None, False))[0] != known:
            ours = {id(p) for root in self.roots for p in root.parameters()}
            owned = any(id(p) in ours for group in optimizer.param_groups for p in group["params"])
            self._owned[optimizer] = (known, owned)
        return self._owned[optimizer][1]

    def _finish(self) -> None:
        iteration, self._iteration = self._iteration, None
        self._over = False
        if iteration is None or self.conductor is None or not iteration.passes:
            return
        self._ended(*self.conductor.finish(iteration))

    def starved(self, error: torch.OutOfMemoryError) -> None:
        """The device ran out of memory: give the iteration up, tighten the plan of the next."""
        self._abort()
        if self.conductor is not None:
            self.conductor.starved()
        tell(error, self.conductor)

    def _abort(self) -> None:
        self._inside, self._over = None, False
        iteration, self._iteration = self._iteration, None
        if iteration is not None:
            iteration.abort()
