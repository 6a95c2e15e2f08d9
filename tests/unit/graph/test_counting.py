"""The bytes that live storages hold, counted op by op without looking at all of them."""

from __future__ import annotations

import random
import sys
import threading
from typing import Any

import torch
from torch import nn

from belady.graph.counting import Counted
from belady.ir.hardware import Allocator

ALLOCATOR = Allocator(round_bytes=64, margin_fraction=0.0, margin_bytes=0)


def empty() -> Counted:
    return Counted([], ALLOCATOR)


def held(tensors: list[torch.Tensor]) -> int:
    storages = {it.untyped_storage()._cdata: it.untyped_storage().nbytes() for it in tensors}
    return sum(map(ALLOCATOR.held, storages.values()))


def test_what_is_born_and_dies_is_counted_as_if_all_were_looked_at() -> None:
    model = nn.Linear(5, 7)
    model.weight.grad = torch.zeros_like(model.weight)
    lasting = [*model.parameters(), model.weight.grad]
    counted, chance = Counted([model], ALLOCATOR), random.Random(0)
    live: list[torch.Tensor] = []
    peak = 0
    for _ in range(300):
        made = (torch.empty(chance.randrange(200)), torch.empty(3))
        views = (made[0], made[0][1:], None, made[1], 4)
        counted.stop(views)
        live += [it for it in views if isinstance(it, torch.Tensor)]
        del made, views
        peak = max(peak, held([*lasting, *live]))
        assert counted.peak_bytes == peak
        chance.shuffle(live)
        del live[chance.randrange(1, 60) :]


def test_a_storage_counts_with_the_bytes_that_it_has_now() -> None:
    counted, tensor = empty(), torch.empty(64)
    counted.stop((tensor,))
    tensor.untyped_storage().resize_(0)
    counted.stop((tensor,))
    other = torch.empty(32)
    counted.stop((other,))
    assert counted.peak_bytes == 256
    tensor.untyped_storage().resize_(1024)
    counted.stop((tensor,))
    assert counted.peak_bytes == 1024 + 128


def test_what_another_thread_lets_go_of_is_gone() -> None:
    counted, live = empty(), [torch.empty(64)]
    counted.stop(tuple(live))
    other = threading.Thread(target=live.clear)
    other.start()
    other.join()
    more = torch.empty(16)
    counted.stop((more,))
    assert counted.peak_bytes == 256


def test_an_op_costs_no_more_where_much_is_held() -> None:
    def work(counted: Counted, storages: int) -> int:
        live = [torch.empty(1) for _ in range(storages)]
        counted.stop(tuple(live))
        made, calls = (torch.empty(1),), 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        counted.stop(made)
        sys.setprofile(None)
        return calls

    assert work(empty(), 1000) == work(empty(), 10)
