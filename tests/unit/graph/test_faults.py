"""After a fault in the middle, the next iteration of a captured graph works and nothing is kept."""

from __future__ import annotations

import errno
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from belady.errors import SpillError
from belady.graph.capture import backend_of
from belady.graph.state import State
from belady.ir.plan import Assignment, Budget, Offload, Plan
from belady.ir.trace import Tier, Trace
from tests.parity.graphs import PlannedHost
from tests.support.memory import CarrierUnderTest, FaultyFiles

WIDTH = 64


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))


def all_to_disk(trace: Trace) -> Plan:
    """Every value leaves at once and is back just in time."""

    assignments = []
    for index in trace.saved:
        value = trace.values[index]
        first, read = value.first_save, value.first_read
        gone = trace.storages[value.storage].released
        if read is not None and gone < read:
            move = Offload(Tier.DISK, first - 1, gone, read, read)
            assignments.append(Assignment(index, move))
    assert len(assignments) > 1
    return Plan(trace.fingerprint, "moves/1", Budget(1 << 30), tuple(assignments))


def broken() -> OSError:
    return OSError(errno.EIO, "on purpose")


def gradients(network: nn.Module, run: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(run(x).square().sum(), list(network.parameters())))


@pytest.mark.parametrize("calls", [{"pwrite"}, {"pread"}], ids=["forward", "backward"])
@pytest.mark.parametrize("at", [1, 2])
def test_a_disk_that_fails_once_costs_one_iteration(at: int, calls: set[str]) -> None:
    network, x = model(), torch.randn(32, WIDTH)
    files = FaultyFiles(at, broken, calls=frozenset(calls))
    carrier = CarrierUnderTest("cpu", files=files)
    host = PlannedHost([network], carrier, all_to_disk)
    run = torch.compile(network, backend=backend_of(host), dynamic=False)
    try:
        with pytest.raises(SpillError):
            gradients(network, run, x)
        expected = gradients(network, network, x)
        assert all(map(torch.equal, gradients(network, run, x), expected))
        assert carrier.disk_bytes == 0
    finally:
        carrier.close()


def test_an_error_of_the_loss_leaves_nothing_behind() -> None:
    network, x = model(), torch.randn(32, WIDTH)
    carrier = CarrierUnderTest("cpu")
    host = PlannedHost([network], carrier, all_to_disk)
    run = torch.compile(network, backend=backend_of(host), dynamic=False)
    states: list[weakref.ref[State]] = []
    host.left = lambda graph, state, results: states.append(weakref.ref(state))  # type: ignore[method-assign]

    def fails() -> None:
        y = run(x)
        assert carrier.disk_bytes > 0
        raise ZeroDivisionError(y.shape)

    try:
        with pytest.raises(ZeroDivisionError):
            fails()
        gc.collect()
        assert states[0]() is None
        assert carrier.disk_bytes == 0
    finally:
        carrier.close()
