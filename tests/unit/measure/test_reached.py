"""What forwards and hooks change outside of modules is put back after a call without bytes."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from belady.errors import TraceError
from belady.measure import changes, reached
from belady.measure.static import static_trace
from tests.support import reached_from

_CPU = torch.device("cpu")
CACHE: dict[str, Tensor] = {}
SEEN: list[Tensor] = []
LATEST: deque[Tensor] = deque(maxlen=2)
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
    kept = CACHE, SEEN, LATEST, SETTINGS.held, reached_from.KEPT
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
    # It has bytes, which the call has not.
    with pytest.raises(TraceError):
        static_trace(Net(turned), ((torch.randn(4, 8),), {}), _CPU)
    assert angles(8) is real
    angles.cache_clear()


@functools.cache
def registered() -> dict[str, int]:
    """Done once, by whoever comes first."""
    REGISTERED.append("registered")
    return {}


REGISTERED: list[str] = []
READY = [False]


def prepared(h: Tensor) -> Tensor:
    if not READY[0]:
        READY[0] = True
        registered()["size"] = h.shape[-1]
    return h * registered()["size"]


def test_what_is_done_once_stays_done() -> None:
    """It may have left something that nobody can put back, and would be done again."""
    static_trace(Net(prepared), ((torch.randn(4, 8),), {}), _CPU)
    assert (REGISTERED, READY) == (["registered"], [True])


class History(list[Tensor]):
    """Has a word of its own for what lists have."""

    def __init__(self, *of: Tensor) -> None:
        super().__init__(of)

    def clear(self) -> None:
        raise AssertionError("nobody asks it")

    def copy(self) -> History:
        raise AssertionError("nobody asks it")


class Table(OrderedDict[str, Tensor]):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


def test_containers_of_classes_of_ones_own_are_as_before() -> None:
    first, table = torch.ones(8), Table("a")
    history, counts = History(first), Counter(a=1)
    table["one"] = first

    def change(h: Tensor) -> Tensor:
        history.append(h.detach())
        table["two"] = h.detach()
        counts["a"] += 1
        return h

    static_trace(Net(change), ((torch.randn(4, 8),), {}), _CPU)
    assert [it is first for it in history] == [True]
    assert [*table] == ["one"]
    assert counts == {"a": 1}


class Frozen(type):
    """Has classes that nobody changes."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError(name)


def test_all_is_put_back_whatever_becomes_of_one() -> None:
    class Held(metaclass=Frozen):
        numbers = iter(range(9))

    numbers, weights = itertools.count(), {nn.Parameter(torch.ones(2)): torch.ones(2)}

    def change(h: Tensor) -> Tensor:
        weights.update({})
        return h * next(numbers) + len(weights) * next(Held.numbers)

    with suppress(TraceError):
        static_trace(Net(change), ((torch.randn(4, 8),), {}), _CPU)
    assert next(numbers) == 0


def test_what_libraries_hold_is_left_alone() -> None:
    parts = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    own = [vars(part) for part in parts.modules()]
    found = reached.Reached.by(parts)
    assert all(it.func.__self__.space in own for it in found.undo)  # type: ignore[attr-defined]
    assert found.instead == []


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
    fork = changes.forked(one)
    rest = [next(fork, None) for _ in range(7)]
    assert rest == [next(one, None) for _ in range(7)] == [next(same, None) for _ in range(7)]
