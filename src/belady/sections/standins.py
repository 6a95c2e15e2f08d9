"""What stands in modules while slices run: aliases of parameters, other forwards of dropouts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class StandIns:
    """Puts detached aliases where the modules of one model hold their trainable parameters.

    So that the graphs of slices never reach ``.grad``: a gradient that autograd computes for a
    parameter itself would run the hooks on it, once for every slice. An alias has the parameter's
    bytes and none of its hooks.

    Attributes
    ----------
    lock
        To be held by whoever calls the modules: another thread would meet the aliases.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []

    @contextmanager
    def standing(
        self,
        modules: Iterable[torch.nn.Module],
        forwards: Mapping[torch.nn.Module, Callable[..., Any]],
    ) -> Iterator[dict[Tensor, Tensor]]:
        """Replace the trainable parameters of ``modules`` (themselves, not their children).

        Parameters
        ----------
        forwards
            What else some modules do in the place of their forward.

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
                        self._replace(holder, name, aliases[parameter])
            for module, forward in forwards.items():
                self._replace(vars(module), "forward", forward)
            yield aliases
        finally:
            self.restore()

    def _replace(self, holder: dict[str, Any], name: str, new: Any) -> None:
        self._replaced.append((holder, name, holder.get(name)))
        holder[name] = new

    def restore(self) -> None:
        """Put everything back, also what an interrupted call has left replaced."""
        while self._replaced:
            holder, name, before = self._replaced[-1]
            if before is None:
                holder.pop(name, None)
            else:
                holder[name] = before
            # Only now: an interrupt in between must not make it forgotten.
            self._replaced.pop()
