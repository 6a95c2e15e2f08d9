"""Aliases in the place of parameters, so that the graphs of slices never reach ``.grad``."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class StandIns:
    """Puts detached aliases where the modules of one model hold their trainable parameters.

    A gradient that autograd computes for a parameter itself would run the hooks on it, once for
    every slice. An alias has the parameter's bytes and none of its hooks.

    Attributes
    ----------
    lock
        To be held by whoever calls the modules: another thread would meet the aliases.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._replaced: list[tuple[dict[str, Any], str, Tensor]] = []

    @contextmanager
    def standing(self, modules: Iterable[torch.nn.Module]) -> Iterator[dict[Tensor, Tensor]]:
        """Replace the trainable parameters of ``modules`` (themselves, not their children).

        Yields
        ------
        dict
            The alias of each parameter.
        """
        self.restore()
        aliases: dict[Tensor, Tensor] = {}
        try:
            for module in modules:
                holder: dict[str, Any] = module._parameters
                for name, parameter in list(holder.items()):
                    if parameter is not None and parameter.requires_grad:
                        if parameter not in aliases:
                            aliases[parameter] = parameter.detach().requires_grad_()
                        self._replaced.append((holder, name, parameter))
                        holder[name] = aliases[parameter]
            yield aliases
        finally:
            self.restore()

    def restore(self) -> None:
        """Put the parameters back, also those that an interrupted call has left replaced."""
        while self._replaced:
            holder, name, parameter = self._replaced[-1]
            holder[name] = parameter
            # Only now: an interrupt in between must not make it forgotten.
            self._replaced.pop()
