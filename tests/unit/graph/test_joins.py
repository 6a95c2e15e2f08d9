"""Slices in a graph are joined as they come, and what they are joined to is a value like others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from belady.errors import StaleValueError
from belady.graph import capture
from belady.graph.contents import Content, Contents
from belady.ir.plan import Budget, Offload, Plan, Section
from belady.ir.trace import Trace
from belady.memory.carrier import Carrier
from belady.planners import plan as make_plan
from belady.planners import smallest_budget
from tests.parity.graphs import Chooser
from tests.unit.planners.nets import cpu, gpu
from tests.unit.sections.test_unrolled import Captured, keep

NARROW, WIDE = 64, 128


@pytest.fixture
def carrier() -> Iterator[Carrier]:
    carrier = Carrier("cpu")
    yield carrier
    carrier.close()
    torch._dynamo.reset()


def floor(trace: Trace) -> Plan:
    """All that may move does."""
    return make_plan("floor", trace, cpu(), Budget(1 << 40))


class Ending(nn.Module):
    """A stretch whose result is saved by what follows it, and perhaps given out."""

    def __init__(self, *, gives: bool = True) -> None:
        super().__init__()
        self.gives = gives
        torch.manual_seed(0)
        self.first = nn.Linear(NARROW, NARROW)
        self.stretch = nn.Sequential(nn.Linear(NARROW, WIDE), nn.ReLU(), nn.Linear(WIDE, NARROW))
        self.last = nn.Sequential(
            nn.Linear(NARROW, NARROW), nn.Tanh(), nn.Linear(NARROW, NARROW), nn.Tanh()
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        joined = self.stretch(self.first(x).tanh())
        return self.last(joined), joined if self.gives else x


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(NARROW, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(x).sum()


def captured(model: nn.Module, carrier: Carrier, choose: Chooser = keep) -> Captured:
    names = tuple(f"stretch.{child}" for child in range(3))
    call = Captured(model, carrier, Section(names, 4))
    call.host.replan(carrier, choose)
    return call


def gradients(call: Captured, x: Tensor) -> list[Tensor]:
    found, joined = call(x)
    loss = found.square().sum() + joined.sum()
    inputs = [x, *call.model.parameters()]
    return [found.detach(), joined.detach(), *torch.autograd.grad(loss, inputs)]


def given() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1023, NARROW, generator=generator).requires_grad_()


def test_each_slice_is_written_to_its_place_before_the_next_one_is_made(carrier: Carrier) -> None:
    call = captured(Ending(), carrier)
    gradients(call, given())
    (drawn,) = call.host.drawn
    names = [op.name for op in drawn.trace.ops]
    assert "aten.cat.default" not in names
    made = [at for at, name in enumerate(names) if name.startswith("belady.")]
    assert [names[at] for at in made] == 2 * ["belady.begun.default", *3 * ["belady.put.default"]]
    forward = [at for at in made if at < names.index("aten.tanh_backward.default")]
    relus = [at for at, name in enumerate(names) if name == "aten.relu.default"]
    assert all(relus[index + 1] > forward[index] for index in range(3))


def test_it_needs_less_than_joining_them_at_the_end(
    carrier: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = []
    for _ in range(2):
        call = Captured(Summed(), carrier, Section(("wide",), 8))
        call(torch.randn(1024, NARROW)).backward()
        (drawn,) = call.host.drawn
        needed.append(smallest_budget("floor", drawn.trace, gpu(), Budget(1 << 40)))
        monkeypatch.setattr(capture, "join_as_they_come", lambda _: None)
    assert needed[0] < 0.7 * needed[1]


def test_what_is_joined_can_be_moved_and_comes_back_whole(
    carrier: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: dict[int, Tensor] = {}
    hold = Contents.hold

    def noted(self: Contents, value: int, tensor: Tensor, guarded: bool) -> Content:
        held[value] = tensor.clone()
        return hold(self, value, tensor, guarded)

    monkeypatch.setattr(Contents, "hold", noted)
    model, x = Ending(gives=False), given()
    kept = gradients(captured(model, carrier), x)
    assert held == {}
    call = captured(model, carrier, floor)
    moved = gradients(call, x)
    for one, two in zip(kept, moved, strict=True):
        assert torch.equal(one, two)
    ((drawn,), (plan,)) = call.host.drawn, call.host.plans
    trace = drawn.trace
    (joined,) = (
        value
        for value, it in enumerate(trace.values)
        if trace.ops[it.producer].name == "belady.put.default" and it.saves
    )
    assert trace.values[joined].version == 3
    assert isinstance(plan.decisions[joined], Offload)
    # Not before the last slice is in its place.
    torch.testing.assert_close(held[joined], model.stretch(model.first(x).tanh()))


def test_what_is_joined_and_given_out_may_not_be_changed(carrier: Carrier) -> None:
    for choose in (keep, floor):
        found, joined = captured(Ending(), carrier, choose)(given())
        joined.detach().add_(1)
        with pytest.raises(StaleValueError):
            (found.sum() + joined.sum()).backward()
