"""What a user's hook sees of the call without bytes that a new kind of iteration begins with."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import belady

CALLS = 3


@pytest.fixture(params=["eager", "graph"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def called(hook: Any, engine: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[0].kept = []
    model[0].register_forward_hook(hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with belady.virtualize(model, 1 << 30, engine=engine):
        for _ in range(CALLS):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def test_a_hook_that_looks_for_fake_tensors_has_one_entry_a_call(engine: str) -> None:
    kept: list[Tensor] = []

    def hook(_: nn.Module, _args: Any, out: Tensor) -> None:
        if not isinstance(out, FakeTensor):
            kept.append(out.detach())

    called(hook, engine)
    assert [type(it) for it in kept] == [Tensor] * CALLS


def test_what_a_hook_keeps_on_a_module_is_without_fake_tensors(engine: str) -> None:
    def hook(module: Any, _args: Any, out: Tensor) -> None:
        module.kept.append(out.detach())

    model = called(hook, engine)
    assert [type(it) for it in model[0].kept] == [Tensor] * CALLS


def test_what_a_hook_keeps_in_a_list_of_ones_own_is_without_them_too(engine: str) -> None:
    kept: list[Tensor] = []
    called(lambda _module, _args, out: kept.append(out.detach()), engine)
    assert [type(it) for it in kept] == [Tensor] * CALLS


def collecting(kept: list[Tensor]) -> Generator[None, Tensor, None]:
    while True:
        kept.append((yield))


def test_what_a_generator_keeps_is_left_there_as_the_guide_says() -> None:
    kept: list[Tensor] = []
    collects = collecting(kept)
    next(collects)
    called(lambda _module, _args, out: collects.send(out.detach()), "eager")
    assert [type(it) for it in kept] == [FakeTensor] + [Tensor] * CALLS
