"""Puts back what running a module's Python code may have changed."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from belady.measure.changes import Undo
from belady.measure.reached import Reached

_MAPPINGS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, deque)
_CONTAINERS = (*_MAPPINGS, *_SEQUENCES, set)
# What is longer is data, not a cache: its own items come back, but not what is inside them.
_MOST_ITEMS = 10_000


@contextmanager
def untouched(
    module: torch.nn.Module, call: tuple[Any, Any], device: torch.device
) -> Iterator[list[Any]]:
    """Leave everything as it was found that a call of ``module`` is known to change.

    That is: the attributes of its submodules and of objects among the arguments, with the lists,
    dicts and sets that they hold; what its code reaches beside it, see `Reached`; the random state
    of torch, NumPy and Python; autocast's cache.

    Yields
    ------
    list
        The dicts, lists and sets of the module, each once; they may be changed too.
    """
    undo = [*_random_state(device)]
    seen: set[int] = set()
    owned: list[Any] = []
    for part in module.modules():
        owned += _containers(vars(part), seen)
    given: list[Any] = []
    for leaf in tree_leaves(call):
        if hasattr(leaf, "__dict__") and not isinstance(leaf, (torch.Tensor, type)):
            given += _containers(vars(leaf), seen)
    undo += [_putting_back(container) for container in (*owned, *given)]
    reached = Reached.by(module)
    # All of them, whatever becomes of one.
    with ExitStack() as undone:
        undone.callback(torch.clear_autocast_cache)
        for put_back in (*undo, *reached.undo):
            undone.callback(put_back)
        for place, instead in reached.instead:
            undone.callback(place.put, place.get())
            place.put(instead)
        yield owned


def replace_tensors(
    containers: Iterable[Any], replaced: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Put ``replaced(tensor)`` in the place of every tensor that lies in a dict or list."""
    for container in containers:
        if type(container) in _MAPPINGS:
            places = list(container.items())
        elif type(container) in _SEQUENCES:
            places = list(enumerate(container))
        else:
            continue
        for place, item in places:
            if isinstance(item, torch.Tensor):
                container[place] = replaced(item)


def _random_state(device: torch.device) -> Iterator[Undo]:
    python = random.getstate()
    numpy = np.random.get_state()  # noqa: NPY002 (the global generator is the one users draw from)
    cpu = torch.get_rng_state()
    yield lambda: random.setstate(python)
    yield lambda: np.random.set_state(numpy)  # noqa: NPY002
    yield lambda: torch.set_rng_state(cpu)
    if device.type == "cuda":
        cuda = torch.cuda.get_rng_state(device)
        yield lambda: torch.cuda.set_rng_state(cuda, device)


def _containers(container: Any, seen: set[int]) -> Iterator[Any]:
    """``container`` and the containers among its items, but for those in ``seen``."""
    if id(container) in seen:
        return
    seen.add(id(container))
    yield container
    if len(container) <= _MOST_ITEMS:
        for item in container.values() if type(container) in _MAPPINGS else container:
            if type(item) in _CONTAINERS:
                yield from _containers(item, seen)


def _putting_back(container: Any) -> Undo:
    items = container.copy()

    def put_back() -> None:
        # Others may look at it meanwhile.
        if _is_as_before(container, items):
            return
        container.clear()
        if type(container) in _SEQUENCES:
            container.extend(items)
        else:
            container.update(items)

    return put_back


def _is_as_before(container: Any, items: Any) -> bool:
    if len(container) != len(items):
        return False
    if type(container) in _MAPPINGS:
        pairs = zip(container.items(), items.items(), strict=True)
        return all(name is before and it is was for (name, it), (before, was) in pairs)
    return all(it is was for it, was in zip(container, items, strict=True))
