"""Memory apart: equal copies in segments of their own, which outlive the pool and come back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from belady.memory import apart as apart_of_torch
from belady.memory.apart import Apart
from belady.memory.cap import enforce
from belady.memory.lanes import resolve
from tests.support.memory import random_bytes
from tests.support.segments import GENERAL, pool_of

gpu = pytest.mark.gpu

MIB = 2**20


def test_on_a_cpu_nothing_is_apart() -> None:
    apart = Apart(torch.device("cpu"))
    assert apart.copy(torch.ones(4)) is None
    apart.close()


@pytest.fixture
def apart() -> Iterator[Apart]:
    apart = Apart(resolve("cuda"))
    yield apart
    apart.close()
    torch.cuda.empty_cache()


def copied(apart: Apart, tensor: Tensor) -> Tensor:
    copy = apart.copy(tensor)
    assert copy is not None
    return copy


SHAPES: dict[str, Callable[[], Tensor]] = {
    "row by row": lambda: torch.randn(700, 600),
    "column by column": lambda: torch.randn(600, 700).t(),
    "channels last": lambda: torch.randn(4, 8, 100, 90).to(memory_format=torch.channels_last),
    "half": lambda: torch.randn(700, 600).bfloat16(),
    "integers": lambda: torch.arange(500_000),
    "one number": lambda: torch.tensor(3.5),
    "nothing": lambda: torch.empty(0, 5),
}


@gpu
@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)
def test_a_copy_has_equal_bytes_and_strides(make: Callable[[], Tensor], apart: Apart) -> None:
    tensor = make().cuda()
    copy = copied(apart, tensor)
    assert (copy.dtype, copy.shape, copy.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert torch.equal(copy, tensor)
    if tensor.numel():
        assert copy.data_ptr() != tensor.data_ptr()


@gpu
def test_copies_lie_together_and_apart_from_the_rest(apart: Apart) -> None:
    before = torch.ones(2 * MIB, device="cuda")
    copies = [copied(apart, before) for _ in range(3)]
    after = torch.ones(2 * MIB, device="cuda")
    assert {pool_of(before), pool_of(after)} == {GENERAL}
    (pool,) = {pool_of(copy) for copy in copies}
    assert pool != GENERAL
    other = Apart(resolve("cuda"))
    assert pool_of(copied(other, before)) not in (GENERAL, pool)
    other.close()


@gpu
def test_a_copy_waits_for_what_was_issued_before(apart: Apart) -> None:
    tensor = torch.zeros(4 * MIB, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
    tensor.fill_(7)
    copy = copied(apart, tensor)
    tensor.fill_(1)
    assert (copy == 7).all()


@gpu
def test_what_lies_on_another_device_or_is_captured_is_not_copied(apart: Apart) -> None:
    assert apart.copy(torch.ones(4)) is None
    tensor, found = torch.ones(4, device="cuda"), []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found.append(apart.copy(tensor))
        tensor.add_(1)
    assert found == [None]


@gpu
def test_a_copy_outlives_its_pool(apart: Apart) -> None:
    tensor = random_bytes(64 * MIB, "cuda")
    copy = copied(apart, tensor)
    apart.close()
    apart.close()
    torch.cuda.empty_cache()
    others = [torch.full((16 * MIB,), 0xEE, dtype=torch.uint8, device="cuda") for _ in range(8)]
    assert torch.equal(copy, tensor)
    assert all((other == 0xEE).all() for other in others)


@gpu
@pytest.mark.parametrize("closed_first", [True, False])
def test_memory_comes_back(closed_first: bool, apart: Apart) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    copy = copied(apart, random_bytes(64 * MIB, "cuda"))
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() >= before + 64 * MIB
    if closed_first:
        apart.close()
        assert torch.cuda.memory_reserved() >= before + 64 * MIB
        del copy
    else:
        del copy
        apart.close()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


@gpu
def test_after_close_there_is_another_pool(apart: Apart) -> None:
    tensor = random_bytes(4 * MIB, "cuda")
    first = copied(apart, tensor)
    apart.close()
    second = copied(apart, tensor)
    assert len({GENERAL, pool_of(first), pool_of(second)}) == 3
    assert torch.equal(first, second)


@gpu
def test_without_room_there_is_no_copy_and_no_error(apart: Apart) -> None:
    torch.cuda.empty_cache()
    budget = torch.cuda.memory_reserved() + 256 * MIB
    undo = enforce(resolve("cuda"), budget)
    try:
        tensor = random_bytes(160 * MIB, "cuda")
        assert apart.copy(tensor) is None
        assert torch.cuda.memory_reserved() <= budget
        assert torch.equal(tensor.cpu(), random_bytes(160 * MIB))
    finally:
        undo()


@gpu
def test_what_is_held_has_room_for_copies_when_all_else_is_taken(apart: Apart) -> None:
    sizes = [24 * MIB, 12 * MIB, 9 * MIB]
    apart.hold(sum(sizes))
    made = [random_bytes(nbytes, "cuda") for nbytes in sizes]
    undo = enforce(resolve("cuda"), torch.cuda.memory_reserved())
    try:
        copies = [copied(apart, it) for it in made]
        reserved = torch.cuda.memory_reserved()
        apart.hold(sum(sizes))
        assert torch.cuda.memory_reserved() <= reserved
    finally:
        undo()
    # Comparing takes memory, of which there was none.
    assert all(map(torch.equal, copies, made))


@gpu
def test_where_there_is_no_room_nothing_is_held(apart: Apart) -> None:
    undo = enforce(resolve("cuda"), torch.cuda.memory_reserved() + 64 * MIB)
    try:
        reserved = torch.cuda.memory_reserved()
        apart.hold(256 * MIB)
        assert torch.cuda.memory_reserved() <= reserved
    finally:
        undo()


def test_on_a_cpu_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart_of_torch, "_new_pool", lambda: pytest.fail("a pool is made"))
    Apart(torch.device("cpu")).hold(MIB)


@gpu
def test_gradients_are_copied_by_the_thread_of_backward(apart: Apart) -> None:
    weight = nn.Parameter(torch.ones(1024, 1024, device="cuda"))
    threads: set[int] = set()

    def move(parameter: Tensor) -> None:
        threads.add(threading.get_ident())
        assert parameter.grad is not None
        parameter.grad = apart.copy(parameter.grad)

    weight.register_post_accumulate_grad_hook(move)
    for _ in range(3):
        weight.grad = None
        (weight * 3).sum().backward()
        assert weight.grad is not None
        assert (weight.grad == 3).all()
        assert pool_of(weight.grad) != GENERAL
    assert threads.isdisjoint({threading.get_ident()})
    # Nothing else that thread does is apart.
    product = torch.ones(1024, 1024, device="cuda", requires_grad=True)
    (product * 2).sum().backward()
    assert product.grad is not None
    assert pool_of(product.grad) == GENERAL
