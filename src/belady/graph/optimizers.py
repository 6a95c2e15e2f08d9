"""What is told of the steps of all optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle


class Stepped:
    """A hook that keeps nothing alive, nor is compiled with a step.

    Parameters
    ----------
    method
        Of ``owner``, which is given the optimizer and the arguments of the step.
    """

    def __init__(self, owner: object, method: str) -> None:
        self._owner, self._method = weakref.ref(owner), method

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self, optimizer: torch.optim.Optimizer, args: Sequence[Any], named: dict[str, Any]
    ) -> None:
        """Call the method, if there still is whose it is."""
        owner = self._owner()
        if owner is not None:
            getattr(owner, self._method)(optimizer, *args[1:], **named)


class Following:
    """Has methods of ``owner`` called around each step of any optimizer, as long as it lives."""

    def __init__(
        self, owner: object, *, begins: str | None = None, ended: str | None = None
    ) -> None:
        self._handles: list[RemovableHandle] = []
        if begins is not None:
            self._handles.append(register_optimizer_step_pre_hook(Stepped(owner, begins)))
        if ended is not None:
            self._handles.append(register_optimizer_step_post_hook(Stepped(owner, ended)))
        for handle in self._handles:
            weakref.finalize(owner, handle.remove)

    def close(self) -> None:
        """No more."""
        for handle in self._handles:
            handle.remove()


class Ours:
    """Tells optimizers that have parameters of some models from others.

    Parameters
    ----------
    modules
        The models; the list may grow.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = modules
        # Asked once of each: others step, too.
        self._known = weakref.WeakKeyDictionary[torch.optim.Optimizer, bool]()

    def __contains__(self, optimizer: torch.optim.Optimizer) -> bool:
        if optimizer not in self._known:
            ours = {id(it) for module in self._modules for it in module.parameters()}
            has = (id(it) in ours for group in optimizer.param_groups for it in group["params"])
            self._known[optimizer] = any(has)
        return self._known[optimizer]
