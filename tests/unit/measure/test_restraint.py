"""Convolutions that are observed leave what a plan will leave."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import belady
from belady.measure import probe, restraint
from belady.measure.probe import CPU_ALLOCATOR
from belady.measure.restraint import Restrained
from belady.sections import searching
from belady.sections.timing import Timing

CPU = torch.device("cpu")
CONVOLUTION = torch.ops.aten.convolution.default
LESS = 1000
BUDGET = 3 * 2**20


class Cap:
    """Stands for the limit on a device's memory."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.fails = False
        self._kept: dict[int, int] = {}

    def __call__(self, device: torch.device, owner: object, nbytes: int) -> None:
        self.asked.append(nbytes)
        self._kept[id(owner)] = nbytes
        if self.fails and nbytes:
            raise RuntimeError("no such device")

    @property
    def kept_back(self) -> int:
        return sum(self._kept.values())


def convolved(issue: Any) -> torch.Tensor:
    torch.manual_seed(0)
    images, weight = torch.rand(2, 3, 8, 8), torch.rand(4, 3, 3, 3)
    rest = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    result: torch.Tensor = issue(CONVOLUTION, (images, weight, *rest), {})
    return result


def test_a_convolution_leaves_room_and_gives_it_back() -> None:
    cap = Cap()
    result = convolved(Restrained(CPU, LESS, cap))
    assert cap.asked == [LESS, 0]
    assert torch.equal(result, convolved(restraint.at_once))


def test_so_does_its_backward() -> None:
    cap = Cap()
    images, weight = torch.rand(2, 3, 8, 8), torch.rand(4, 3, 3, 3)
    rest = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
    backward = torch.ops.aten.convolution_backward.default
    Restrained(CPU, LESS, cap)(backward, (torch.rand(2, 4, 6, 6), images, weight, None, *rest), {})
    assert cap.asked == [LESS, 0]


def test_other_ops_take_what_there_is() -> None:
    cap = Cap()
    x = torch.rand(3)
    assert torch.equal(Restrained(CPU, LESS, cap)(torch.ops.aten.relu.default, (x,), {}), x)
    assert not cap.asked


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB."),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("GET was unable to find an engine to execute this computation"),
    ],
)
def test_where_the_room_is_too_little_all_of_it_is_taken(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    cap, seen = Cap(), []

    def short(*args: Any) -> str:
        seen.append(cap.kept_back)
        if cap.kept_back:
            raise error
        return "done"

    monkeypatch.setattr(restraint, "CONVOLUTIONS", frozenset([short]))
    assert Restrained(CPU, LESS, cap)(short, (), {}) == "done"
    assert seen == [LESS, 0]
    assert cap.kept_back == 0


@pytest.mark.parametrize("error", [RuntimeError("wrong sizes"), KeyboardInterrupt()])
def test_another_error_of_the_call_is_told_at_once(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    cap, calls = Cap(), []

    def wrong() -> None:
        calls.append(cap.kept_back)
        raise error

    monkeypatch.setattr(restraint, "CONVOLUTIONS", frozenset([wrong]))
    with pytest.raises(type(error)):
        Restrained(CPU, LESS, cap)(wrong, (), {})
    assert calls == [LESS]
    assert cap.kept_back == 0


def test_what_could_not_be_kept_back_is_given_back() -> None:
    cap = Cap()
    cap.fails = True
    with pytest.raises(RuntimeError, match="no such device"):
        convolved(Restrained(CPU, LESS, cap))
    assert cap.kept_back == 0


@pytest.mark.parametrize("raced", [False, True])
def test_only_where_slices_were_raced_and_only_while_observed(
    raced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    cap = Cap()
    monkeypatch.setattr(Restrained.__init__, "__defaults__", (cap,))
    monkeypatch.setattr(searching, "workspace_share", lambda *_: 3.15 if raced else 0.0)
    monkeypatch.setattr(Timing, "_tried", lambda _, it: float(it.shape[0]))
    # A margin, as there is on a GPU.
    allocator = replace(CPU_ALLOCATOR, margin_fraction=0.1)
    monkeypatch.setattr(probe, "CPU_ALLOCATOR", allocator)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(8), nn.Flatten())
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    x = torch.rand(32, 3, 32, 32)
    asked, phases = [0], []
    with belady.virtualize(net, BUDGET) as vm:
        vm.listeners.append(lambda stats: phases.append(stats.phase))
        for _ in range(10):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            asked.append(len(cap.asked))
        assert "slices along the batch" in vm.report()
        # Another kind of iteration, which fits as it is.
        net(x[:2]).square().mean().backward()
        optimizer.step()
        assert len(cap.asked) == asked[-1]
    observed = sum(phase in ("warm-up", "observed") for phase in phases[:10])
    assert 0 < observed < 10
    each = [after > before for before, after in pairwise(asked)]
    assert each == [raced and number < observed for number in range(10)]
    left = BUDGET - allocator.peak_within(BUDGET)
    assert set(cap.asked) == ({0, left} if raced else set())
    assert cap.kept_back == 0
