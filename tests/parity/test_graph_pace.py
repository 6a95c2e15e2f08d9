"""How fast a compiler's kernels are is known, however late the host issues them."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.nn import functional

import belady
from belady.ir.trace import Phase
from belady.measure.monitor import Sample
from tests.support.models import Task
from tests.support.training import Training, autocast

WIDTH, LAYERS = 2048, 6
LATE_S = 3e-3


def layers() -> list[nn.Module]:
    parts = [(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return [nn.Sequential(*(it for part in parts for it in part))]


def numbers(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x, wanted = (torch.randn(4096 * size, WIDTH, generator=generator) for _ in range(2))
    return x, wanted


def kernel_seconds() -> float:
    """Of forward and backward, as they are known in the end."""
    training = Training(Task("layers", layers, numbers, functional.mse_loss), "cuda")
    # Everything that may move does: there is a boundary at each layer, twice.
    moving = belady.virtualize(training.models, "16GiB", policy="vdnn_all", engine="inductor")
    with moving as vm:
        training.run(autocast, range(8))
        run = vm.run()
    assert run is not None
    assert run.measured is not None
    assert run.measured.moved
    return sum(op.device_seconds for op in run.trace.ops if op.phase is not Phase.LOSS)


@pytest.mark.gpu
def test_a_late_host_makes_no_kernel_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, known, late = kernel_seconds(), Sample.passed, list[int]()

    def passed(sample: Sample, boundary: int) -> None:
        known(sample, boundary)
        late.append(boundary)
        time.sleep(LATE_S)

    monkeypatch.setattr(Sample, "passed", passed)
    found = kernel_seconds()
    # Waiting for the host would make of every layer's kernels some of three milliseconds.
    assert len(set(late)) >= 2 * LAYERS
    assert found == pytest.approx(prompt, rel=0.25)
    assert prompt < LAYERS * LATE_S
