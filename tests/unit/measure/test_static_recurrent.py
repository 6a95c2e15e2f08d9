"""Recurrent layers are traced without cuDNN, whose dropout state is one for the whole process."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from belady.errors import TraceError
from belady.ir.trace import Phase
from belady.measure.static import static_trace
from belady.memory.lanes import resolve
from tests.unit.measure.watching import CPU

SRC = Path(__file__).parents[3] / "src"
SECONDS = 20.0  # a trace that goes wrong formats its error message for a minute


class Telling(nn.Module):
    """Notes whether cuDNN is on when it is called."""

    def __init__(self, layer: nn.Module, error: Exception | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.error = error
        self.heard = Heard()

    def forward(self, x: Tensor) -> Tensor:
        self.heard.states.append(torch.backends.cudnn.enabled)
        if self.error is not None:
            raise self.error
        result = self.layer(x)
        return result[0] if isinstance(result, tuple) else result


class Heard:
    """Outside what a trace puts back."""

    __slots__ = ("states",)

    def __init__(self) -> None:
        self.states: list[bool] = []


LAYERS = {
    "lstm": lambda: nn.LSTM(6, 6),
    "gru": lambda: nn.GRU(6, 6),
    "rnn": lambda: nn.RNN(6, 6),
    "linear": lambda: nn.Linear(6, 6),
}


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_cudnn_is_off_while_recurrent_layers_are_traced(kind: str, enabled: bool) -> None:
    module = Telling(LAYERS[kind]())
    with torch.backends.cudnn.flags(enabled=enabled):
        static_trace(module, ((torch.ones(3, 2, 6),), {}), CPU)
        assert torch.backends.cudnn.enabled == enabled
    assert module.heard.states == [enabled and kind == "linear"]


@pytest.mark.parametrize("enabled", [True, False])
def test_cudnn_is_as_before_when_the_call_fails(enabled: bool) -> None:
    module = Telling(nn.LSTM(6, 6), KeyError("on purpose"))
    with torch.backends.cudnn.flags(enabled=enabled):
        with pytest.raises(TraceError):
            static_trace(module, ((torch.ones(3, 2, 6),), {}), CPU)
        assert torch.backends.cudnn.enabled == enabled
    assert module.heard.states == [False]


def recurrent() -> tuple[nn.LSTM, Tensor]:
    torch.manual_seed(0)
    return nn.LSTM(32, 32, num_layers=2, dropout=0.5).cuda(), torch.randn(5, 4, 32, device="cuda")


def traced_in_time(layer: nn.Module, x: Tensor) -> None:
    enabled = torch.backends.cudnn.enabled
    started = time.perf_counter()
    trace = static_trace(layer, ((x,), {}), resolve("cuda"))
    assert time.perf_counter() - started < SECONDS
    assert torch.backends.cudnn.enabled == enabled
    assert any(op.phase is Phase.BACKWARD for op in trace.ops)


def drops(layer: nn.LSTM, x: Tensor) -> None:
    """Check that real calls drop in training, and only there."""
    layer.train()
    first, second = (layer(x)[0] for _ in range(2))
    assert first.isfinite().all()
    assert second.isfinite().all()
    assert not torch.equal(first, second)
    first.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    layer.eval()
    with torch.no_grad():
        assert torch.equal(layer(x)[0], layer(x)[0])
    layer.train()


@pytest.mark.gpu
def test_dropout_of_real_calls_is_as_good_after_a_trace_as_before() -> None:
    layer, x = recurrent()
    drops(layer, x)
    traced_in_time(layer, x)
    drops(layer, x)
    traced_in_time(layer, x)


@pytest.mark.gpu
def test_a_trace_before_the_first_real_call_leaves_its_dropout_alone() -> None:
    """In a process of its own: the state is made once."""
    code = f"""
import sys
sys.path[:0] = [{str(SRC)!r}, {str(SRC.parent)!r}]
from tests.unit.measure.test_static_recurrent import drops, recurrent, traced_in_time
layer, x = recurrent()
traced_in_time(layer, x)
drops(layer, x)
traced_in_time(layer, x)
drops(layer, x)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@pytest.mark.gpu
def test_cudnn_is_as_before_when_a_trace_on_the_gpu_fails() -> None:
    layer, x = recurrent()
    enabled = torch.backends.cudnn.enabled
    with pytest.raises(TraceError):
        static_trace(layer, ((x[..., :7],), {}), resolve("cuda"))
    assert torch.backends.cudnn.enabled == enabled
    drops(layer, x)
