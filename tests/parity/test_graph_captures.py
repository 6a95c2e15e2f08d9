"""What Dynamo keeps of one model neither stands in the way of the next nor outlives it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

import belady
from belady.graph import doors
from belady.graph.session import Session

ROOM = 1 << 30
# By itself Dynamo captures code so often, and then never again.
LIMIT = 8


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Strict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor, *, allowed: bool = True) -> Tensor:
        if not allowed:
            raise ValueError("not allowed")
        return torch.relu(self.norm(self.layer(x)))


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def trained(model: nn.Module) -> None:
    for _ in range(4):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("make", [Strict, layers])
def test_many_models_of_one_class_are_all_captured(make: Callable[[], nn.Module]) -> None:
    for _ in range(LIMIT + 1):
        model = make()
        with belady.virtualize(model, ROOM, policy="floor", engine="graph") as vm:
            trained(model)
            assert vm.run() is not None


def test_auto_captures_what_an_error_ended_before() -> None:
    model = Strict()
    with belady.virtualize(model, ROOM, policy="floor", engine="graph"), suppress(ValueError):
        model(torch.ones(2, 4), allowed=False)
    with belady.virtualize(model, ROOM, policy="floor", engine="auto") as vm:
        trained(model)
        assert isinstance(vm._tracker.conductor, Session)
        assert vm.run() is not None
    assert model.norm.num_batches_tracked == 4


def test_auto_goes_on_when_dynamo_gives_up_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "_configured", torch._dynamo.config.patch(recompile_limit=LIMIT))
    model = layers()
    with belady.virtualize(model, ROOM, policy="floor", engine="auto") as vm:
        for size in range(2, 2 * LIMIT + 4):
            model(torch.ones(size, 4)).sum().backward()
        assert "recompile limit" in vm.report()


def test_auto_takes_the_eager_engine_where_the_program_switches_capture_off() -> None:
    class Off(Strict):
        forward = torch.compiler.disable(Strict.forward)

    model = Off()
    with belady.virtualize(model, ROOM, policy="floor", engine="auto") as vm:
        trained(model)
        assert not isinstance(vm._tracker.conductor, Session)
    assert model.norm.num_batches_tracked == 4


def test_nothing_is_left_of_a_session_when_its_model_is_gone() -> None:
    model = layers()
    vm = belady.virtualize(model, ROOM, policy="floor", engine="graph")
    trained(model)
    session = vm._tracker.conductor
    assert session is not None
    known = weakref.ref(session)
    vm.close()
    del vm, model, session
    # What compiled code refers to is only found once the code itself is gone.
    gc.collect()
    gc.collect()
    assert known() is None
