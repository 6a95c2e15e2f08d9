"""Where generated code may take memory."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch

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
