"""What a graph saves on another device than the model's stays there, whatever it was traced on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import belady
from belady.ir.plan import Assignment, Budget, Offload, Plan
from belady.ir.trace import Tier, Trace
from belady.memory.carrier import Carrier
from tests.parity.graphs import PlannedHost
from tests.parity.graphs import compiled as planned
from tests.support.models import Task
from tests.support.training import Training, differences, plain

ELSEWHERE, ITERATIONS, SEED = torch.device("meta"), range(5), (37,)


def scale(name: str, traced_on: str) -> Any:
    """An op that saves a seed on another device, as attention on a GPU does on the host."""

    @torch.library.custom_op(f"belady_tests::{name}", mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, torch.empty(SEED, device=ELSEWHERE)

    @op.register_fake
    def _(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), torch.empty(SEED, device=traced_on)

    @torch.library.custom_op(f"belady_tests::{name}_backward", mutates_args=())
    def backward(gradient: Tensor, seed: Tensor) -> Tensor:
        return gradient * 2

    @backward.register_fake
    def _(gradient: Tensor, seed: Tensor) -> Tensor:
        # With a seed without bytes this one is called, also for a gradient that has some.
        return gradient * 2

    def keep(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[1])

    op.register_autograd(
        lambda ctx, gradient, _: backward(gradient, *ctx.saved_tensors), setup_context=keep
    )
    return op


SCALES = {
    "known": scale("scale_known", "meta"),
    # As attention: its seeds are traced on the device of the operands.
    "unknown": scale("scale_unknown", "cpu"),
}


class Scaled(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.second, self.name = nn.Linear(64, 64), nn.Linear(64, 8), name

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(SCALES[self.name](self.first(x))[0]))


def task_of(name: str) -> Task:
    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, 64, generator=generator)
        return x, torch.randint(8, (size,), generator=generator)

    return Task(name, lambda: [Scaled(name)], batch)


def all_to_disk(trace: Trace) -> Plan:
    moves = []
    for index in trace.saved:
        value = trace.values[index]
        if value.first_read is not None:
            first, read = value.first_save, value.first_read
            moves.append(Assignment(index, Offload(Tier.DISK, first - 1, first, read, read)))
    return Plan(trace.fingerprint, "moves/1", Budget(1 << 30), tuple(moves))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", SCALES)
def test_a_plan_that_moves_everything_leaves_it(name: str) -> None:
    expected, training = Training(task_of(name)).run(plain, range(2)), Training(task_of(name))
    carrier = Carrier("cpu")
    host = PlannedHost(training.models, carrier, all_to_disk)
    try:
        with planned(training, host):
            training.run(plain, range(2))
    finally:
        carrier.close()
    assert host.reasons == []
    assert host.plans[0].decisions
    assert differences(expected.outcome(), training.outcome()) == []


@pytest.mark.parametrize("name", SCALES)
def test_it_is_in_no_decision_once_it_was_seen(name: str) -> None:
    expected, training = Training(task_of(name)).run(plain, ITERATIONS), Training(task_of(name))
    with belady.virtualize(training.models, 1 << 30, policy="baseline", engine="graph") as vm:
        training.run(plain, ITERATIONS)
    run = vm.run()
    assert run is not None
    assert differences(expected.outcome(), training.outcome()) == []
    saved = {save.shape for index in run.trace.saved for save in run.trace.values[index].saves}
    assert saved
    assert SEED not in saved
    assert run.notes == ()
