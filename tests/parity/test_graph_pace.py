"""How fast a compiler's kernels are is known, however late the host issues them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import belady
from belady.ir.trace import Trace
from belady.measure import verification
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


def paced(monkeypatch: pytest.MonkeyPatch, late_s: float) -> tuple[float, float]:
    """Seconds between boundaries, where the device was held back and where not.

    The host is late by some seconds at each boundary.
    """
    shown, anchors, known = list[Sample](), set[int](), Sample.passed

    def passed(sample: Sample, boundary: int) -> None:
        known(sample, boundary)
        anchors.add(boundary)
        time.sleep(late_s)

    def noted(trace: Trace, *given: Any) -> Trace | None:
        shown[:] = given[2]
        return pace_of(trace, *given)

    pace_of = verification.with_pace_of
    training = Training(Task("layers", layers, numbers, functional.mse_loss), "cuda")
    with monkeypatch.context() as patch:
        patch.setattr(Sample, "passed", passed)
        patch.setattr(verification, "with_pace_of", noted)
        # Everything that may move does: there is a boundary at each layer, twice.
        moving = belady.virtualize(training.models, "16GiB", policy="vdnn_all", engine="inductor")
        with moving:
            training.run(autocast, range(8))
    assert len(anchors) >= 2 * LAYERS
    assert {sample.held for sample in shown} == {False, True}
    held, others = (
        min(sum(it.paced.values()) for it in shown if it.held is held) for held in (True, False)
    )
    return held, others


@pytest.mark.gpu
def test_a_late_host_makes_no_kernel_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, _ = paced(monkeypatch, 0.0)
    found, waiting = paced(monkeypatch, LATE_S)
    assert found == pytest.approx(prompt, rel=0.25)
    # Of an iteration in which the device waits for the host nobody could tell.
    assert waiting > 1.5 * found
