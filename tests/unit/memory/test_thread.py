"""Calls on the thread in which autograd runs backward."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from belady.memory.thread import in_backward

CPU = torch.device("cpu")


class Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} was seen")


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, Refusing])
def test_the_call_is_made_wherever_the_caller_is(around: Any) -> None:
    with around():
        assert in_backward(CPU, lambda: torch.ones(3).sum().item()) == 3.0
        assert torch.is_grad_enabled() == (around is Refusing)


def test_its_errors_are_the_callers() -> None:
    def scarce() -> None:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        in_backward(CPU, scarce)


@pytest.mark.parametrize("device", [CPU, pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_an_error_holds_goes_with_it(device: Any) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def fail() -> None:
        tensor = torch.ones(3)
        held.append(weakref.ref(tensor))
        raise RuntimeError(f"no room for {tensor.shape}")

    gc.disable()
    try:
        for _ in range(20):
            with contextlib.suppress(RuntimeError):
                in_backward(torch.device(device), fail)
            assert held.pop()() is None
    finally:
        gc.enable()


def test_an_error_is_no_anomaly() -> None:
    def fail() -> None:
        raise RuntimeError("no room")

    with torch.autograd.set_detect_anomaly(True, check_nan=False), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="no room"):
            in_backward(CPU, fail)
        assert torch.is_anomaly_enabled()


def test_it_can_be_made_within_a_backward() -> None:
    weight = torch.ones(2, requires_grad=True)
    found = []
    weight.register_hook(lambda grad: found.append(in_backward(CPU, lambda: grad.sum().item())))
    (weight * 2).sum().backward()
    assert found == [4.0]


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_thread_and_the_stream_of_backward() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    weight = torch.ones(2, device=device, requires_grad=True)
    where: list[tuple[int, torch.cuda.Stream]] = []

    def here(*_: Any) -> None:
        where.append((threading.get_ident(), torch.cuda.current_stream(device)))

    weight.register_hook(here)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        weight.sum().backward()
        in_backward(device, here)
    assert where[0] == where[1]
    assert where[0][0] != threading.get_ident()
