"""What forwards and hooks change outside of modules is put back after a call without bytes."""

from __future__ import annotations

import functools
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from belady.measure import reached
from belady.measure.static import static_trace
from tests.support import reached_from

_CPU = torch.device("cpu")
CACHE: dict[str, Tensor] = {}
SEEN: list[Tensor] = []
LATEST: deque[Tensor] = deque(maxlen=2)
KINDS: set[tuple[int, ...]] = set()
CALLS = 0
PYTHON, NUMPY = random.Random(5), np.random.default_rng(5)
OLD, TORCH = np.random.RandomState(5), torch.Generator()
SCALES = itertools.cycle([0.5, 1.0, 2.0])


class Settings:
    """Held by the module and by nobody else, or by all."""

    steps = 0

    def __init__(self) -> None:
        self.step = 0
        self.numbers = iter(range(100))
        self.held: list[Tensor] = []


SETTINGS = Settings()


@functools.lru_cache(maxsize=4)
def angles(size: int) -> Tensor:
    return torch.arange(size) / size


def cached(h: Tensor) -> Tensor:
    if "mask" not in CACHE:
        CACHE["mask"] = torch.ones(8)
    return h * CACHE["mask"]


def appended(h: Tensor) -> Tensor:
    SEEN.append(h.detach())
    LATEST.append(h.detach())
    KINDS.add(tuple(h.shape))
    return h


def counted(h: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return h * CALLS


def drawn(h: Tensor) -> Tensor:
    torch.rand(1, generator=TORCH)
    return h * PYTHON.random() * float(NUMPY.random()) * float(OLD.rand())


def scaled(h: Tensor) -> Tensor:
    return h * next(SCALES) * next(SETTINGS.numbers)


def turned(h: Tensor) -> Tensor:
    return h * angles(8)


def of_an_object(h: Tensor) -> Tensor:
    SETTINGS.step += 1
    Settings.steps += 1
    SETTINGS.held.append(h.detach())
    return h


def of_another_file(h: Tensor) -> Tensor:
    return reached_from.change(h)


def shared() -> Callable[[Tensor], Tensor]:
    count, kept = 0, list[Tensor]()

    def change(h: Tensor) -> Tensor:
        nonlocal count
        count += 1
        kept.append(h.detach())
        return h

    return change


class Net(nn.Module):
    """Calls one of these."""

    made = 0

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(8, 8), change

    @staticmethod
    @functools.cache
    def size(width: int) -> Tensor:
        return torch.ones(width)

    def forward(self, x: Tensor) -> Tensor:
        Net.made += 1
        return self.change(self.layer(x)) * self.size(8)


def state() -> Any:
    """All of it, as far as a copy shows it."""
    kept = CACHE, SEEN, LATEST, KINDS, SETTINGS.held, reached_from.KEPT
    caches = angles.cache_info(), Net.size.cache_info(), reached_from.ramp.cache_info()
    counts = CALLS, Settings.steps, SETTINGS.step, Net.made, reached_from.COUNT
    random_ = PYTHON.getstate(), NUMPY.bit_generator.state, repr(OLD.get_state())
    return repr((kept, caches, counts, random_)), TORCH.get_state().tolist()


CHANGES = [
    cached,
    appended,
    counted,
    drawn,
    turned,
    of_an_object,
    of_another_file,
    functools.partial(cached),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda it: getattr(it, "__name__", "partial"))
def test_what_forward_changes_outside_of_modules_is_as_before(
    change: Callable[[Tensor], Tensor],
) -> None:
    before = state()
    static_trace(Net(change), ((torch.randn(4, 8),), {}), _CPU)
    assert state() == before


def test_iterators_go_on_where_they_were() -> None:
    static_trace(Net(scaled), ((torch.randn(4, 8),), {}), _CPU)
    assert [next(SCALES) for _ in range(4)] == [0.5, 1.0, 2.0, 0.5]
    assert next(SETTINGS.numbers) == 0


def test_what_functions_share_is_as_before() -> None:
    change = shared()
    static_trace(Net(change), ((torch.randn(4, 8),), {}), _CPU)
    assert [it.cell_contents for it in change.__closure__ or ()] == [0, []]


def test_hooks_leave_nothing_either() -> None:
    left: list[Tensor] = []
    net = Net(lambda h: h)
    net.layer.register_forward_hook(lambda module, args, given: left.append(given))
    net.register_forward_pre_hook(lambda module, args: left.extend(args))
    static_trace(net, ((torch.randn(4, 8),), {}), _CPU)
    assert left == []


def test_a_cache_of_a_function_keeps_what_it_has() -> None:
    real = angles(8)
    static_trace(Net(turned), ((torch.randn(4, 8),), {}), _CPU)
    assert angles(8) is real
    assert not isinstance(real, FakeTensor)


def test_what_libraries_hold_is_left_alone() -> None:
    found = reached.Reached.by(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert (found.undo, found.holders) == ([], [])


class Proxy:
    """Stands for something that is not there."""

    @property
    def __class__(self) -> type:
        raise RuntimeError("nothing is there")

    @__class__.setter
    def __class__(self, kind: type) -> None:
        """Mypy asks for one."""


def test_what_cannot_be_looked_at_is_left_alone() -> None:
    absent, calls = Proxy(), [0]

    def change(h: Tensor) -> Tensor:
        calls[0] += 1
        return h if absent is not None else h * 2

    static_trace(Net(change), ((torch.randn(4, 8),), {}), _CPU)
    assert calls == [0]


def started(iterator: Iterator[int]) -> Iterator[int]:
    next(iterator)
    return iterator


ITERATORS: list[Callable[[], Iterator[int]]] = [
    lambda: itertools.cycle(iter([1, 2, 3])),
    lambda: itertools.count(3, 2),
    lambda: itertools.chain([1, 2], [3, 4]),
    lambda: itertools.islice(itertools.count(), 2, 9),
    lambda: iter([1, 2, 3, 4]),
    lambda: iter({1: 2, 3: 4}),
    lambda: itertools.accumulate(iter([1, 2, 3])),
]


@pytest.mark.parametrize("make", ITERATORS)
@pytest.mark.skipif(not hasattr(itertools.count(), "__reduce__"), reason="cannot be forked")
def test_a_fork_leaves_an_iterator_where_it_is(make: Callable[[], Iterator[int]]) -> None:
    one, same = started(make()), started(make())
    fork = reached._forked(one)
    rest = [next(fork, None) for _ in range(7)]
    assert rest == [next(one, None) for _ in range(7)] == [next(same, None) for _ in range(7)]
