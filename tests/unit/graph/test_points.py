"""Where generated code may take memory."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from contextlib import suppress
from types import ModuleType, SimpleNamespace

import pytest
import torch

from belady.graph import points
from belady.graph.points import Listener, told_of_points


def made(*_: object) -> str:
    return "a buffer"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What Inductor has written."""
    module = ModuleType("written")
    vars(module)["empty_strided_cuda"] = made
    cache = SimpleNamespace(PyCodeCache=SimpleNamespace(modules=[module, ModuleType("other")]))
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", cache)
    return module


def test_ops_and_buffers_are_told_of(module: ModuleType) -> None:
    told: list[str] = []
    with told_of_points(Listener(lambda: told.append("point"))):
        torch.ones(2) + 1
        assert len(told) == 2
        assert module.empty_strided_cuda((1,), (1,), torch.float32) == "a buffer"
        assert len(told) == 3
    torch.ones(2)
    assert len(told) == 3
    assert module.empty_strided_cuda is made


def test_each_thread_is_told_of_its_own(module: ModuleType) -> None:
    told: list[str] = []
    inside, over = threading.Event(), threading.Event()

    def other() -> None:
        with told_of_points(Listener(lambda: told.append("other"))):
            inside.set()
            over.wait(10)
            module.empty_strided_cuda()

    thread = threading.Thread(target=other)
    with told_of_points(Listener(lambda: told.append("first"))):
        thread.start()
        assert inside.wait(10)
        module.empty_strided_cuda()
    # The other one is still told, and this one no more.
    module.empty_strided_cuda()
    over.set()
    thread.join(10)
    assert told == ["first", "other"]
    assert module.empty_strided_cuda is made


def test_what_may_have_written_is_not_done_again() -> None:
    aten = torch.ops.aten
    assert points.repeats(made)
    assert points.repeats(aten.mm.default)
    assert points.repeats(aten.mm.out)
    assert points.repeats(aten.copy_.default)
    assert not points.repeats(aten.add_.Tensor)
    tried: list[int] = []

    class Failing:
        _schema = aten.add_.Tensor._schema

        def __call__(self) -> None:
            tried.append(1)
            raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        Listener(lambda: None, lambda: True).act(Failing())
    assert tried == [1]


def test_what_may_draw() -> None:
    aten = torch.ops.aten
    drawing = aten.native_dropout.default, aten._scaled_dot_product_efficient_attention.default
    assert all(map(points.draws, drawing))
    assert not any(map(points.draws, (aten.mm.default, made)))


def test_what_has_failed_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def outer() -> weakref.ref[torch.Tensor]:
        mine = torch.ones(3)

        def failing(given: torch.Tensor) -> None:
            raise torch.OutOfMemoryError("no room")

        with suppress(torch.OutOfMemoryError):
            Listener(lambda: None, lambda: False).act(failing, mine)
        return weakref.ref(mine)

    gc.disable()
    try:
        assert outer()() is None
    finally:
        gc.enable()
