"""Norms of captured graphs are made again from their statistics, and dropouts from their masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import belady
from belady.graph import replays
from belady.ir.plan import Plan, Recompute
from belady.ir.run import Run
from belady.ir.trace import Op, Source
from tests.support.models import Task
from tests.support.training import Step, Training, autocast, differences, plain

ITERATIONS = range(6)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Norms(nn.Module):
    """Three kinds of norm over the batch: with running statistics, without, and without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.SiLU(),
            nn.Conv2d(8, 8, 3),
            nn.BatchNorm2d(8, track_running_stats=False),
            nn.SiLU(),
            nn.BatchNorm2d(8, affine=False),
            nn.Conv2d(8, 10, 12),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).flatten(1)


def images(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, 10, (size,), generator=generator)
    return torch.randn(size, 3, 16, 16, generator=generator), labels


def channels_last(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, labels = images(size, generator)
    return x.to(memory_format=torch.channels_last), labels


NORMS = Task("norms", lambda: [Norms()], images)
LAST = Task(
    "norms, channels last",
    lambda: [Norms().to(memory_format=torch.channels_last)],
    channels_last,
)


def trained(task: Task = NORMS, step: Step = plain, device: str = "cpu") -> Run:
    expected = Training(task, device).run(step, ITERATIONS).outcome()
    training = Training(task, device)
    with belady.virtualize(training.models, "1GiB", engine="graph") as vm:
        training.run(step, ITERATIONS)
        run = vm.run()
    assert differences(expected, training.outcome()) == []
    assert run is not None
    assert run.trace.source is Source.GRAPH
    return run


def norms(run: Run) -> list[Op]:
    return [op for op in run.trace.ops if "batch_norm" in op.name and op.replayable]


def made_again(run: Run) -> set[int]:
    """Norms whose results the plan makes again."""
    chosen = (it for it in run.plan.decisions.values() if isinstance(it, Recompute))
    again = {op for replay in chosen for op in replay.ops}
    return {op for op in again if "batch_norm" in run.trace.ops[op].name}


def instead(monkeypatch: pytest.MonkeyPatch, scale: float = 1.0) -> list[Tensor]:
    """Have a stand-in for the kernel that a CPU lacks; the inputs that it was called with."""
    called: list[Tensor] = []

    def from_statistics(
        x: Tensor, weight: Any, bias: Any, mean: Tensor, deviation: Tensor, eps: float
    ) -> Tensor:
        called.append(x)
        again = torch.ops.aten._native_batch_norm_legit.no_stats
        result, own_mean, own_deviation = again(x, weight, bias, True, 0.0, eps)
        same = mean.equal(own_mean) and deviation.equal(own_deviation)
        return result * (scale if same else torch.nan)

    monkeypatch.setattr(replays, "FROM_STATISTICS", from_statistics)
    return called


def test_norms_are_made_again_from_their_statistics(
    replaying: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    called = instead(monkeypatch)
    run = trained()
    found = norms(run)
    assert len(found) == 3
    for op in found:
        assert op.shortcut is not None
        assert op.shortcut.device_seconds > 0
        assert op.shortcut.writes == op.writes[:1]
        assert set(op.writes[1:3]) < set(op.shortcut.reads)
    assert len(made_again(run)) == 2
    # All are tried in each of two iterations; in the others the plan makes two again.
    assert len(called) == 3 * 2 + 2 * (len(ITERATIONS) - 2)


def test_a_way_to_other_bits_is_not_taken(
    replaying: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    called = instead(monkeypatch, scale=1.0 + 2**-20)
    run = trained()
    assert [op.shortcut for op in norms(run)] == [None] * 3
    assert made_again(run)
    assert len(called) == 3 * 2


def test_a_device_without_the_kernel_goes_on_as_it_was(replaying: list[Plan]) -> None:
    run = trained()
    assert [op.shortcut for op in norms(run)] == [None] * 3
    assert made_again(run)


def test_a_policy_that_never_recomputes_tries_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    called, training = instead(monkeypatch), Training(NORMS)
    with belady.virtualize(training.models, "1GiB", policy="lifetime", engine="graph"):
        training.run(plain, ITERATIONS)
    assert called == []


@pytest.mark.gpu
@pytest.mark.parametrize("step", [plain, autocast], ids=["fp32", "bf16"])
@pytest.mark.parametrize("task", [NORMS, LAST], ids=str)
def test_the_kernel_gives_the_same_bits_on_a_gpu(
    task: Task, step: Callable[..., list[Tensor]], replaying: list[Plan]
) -> None:
    run = trained(task, step, "cuda")
    found = norms(run)
    assert len(found) == 3
    # cuDNN, whose bits can be others, does no norm without weights.
    # It can take no longer than a clock needs to be read twice.
    assert found[-1].shortcut is not None
    assert any(run.trace.ops[op].shortcut is not None for op in made_again(run))


SHARE, BLOCKS = 0.3, 3


class Dropped(nn.Module):
    """Each block adds what a dropout leaves; backward reads what was added."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            # By itself a CPU takes other ops.
            x = x + torch.native_dropout(layer(x.tanh()), SHARE, True)[0]
        return x


def rows(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, 16, (size,), generator=generator)
    return torch.randn(size, 16, generator=generator), labels


DROPPED = Task("dropped", lambda: [Dropped()], rows)


def dropouts(run: Run) -> list[int]:
    return [at for at, op in enumerate(run.trace.ops) if "native_dropout.default" in op.name]


def test_dropouts_are_made_again_from_their_masks(replaying: list[Plan]) -> None:
    run = trained(DROPPED)
    found = [run.trace.ops[at] for at in dropouts(run)]
    assert len(found) == BLOCKS
    for op in found:
        assert op.random
        assert op.shortcut is not None
        assert op.shortcut.writes == op.writes[:1]
        assert op.writes[1] in op.shortcut.reads
    chosen = [it for it in run.plan.decisions.values() if isinstance(it, Recompute)]
    assert {op for it in chosen for op in it.ops} & {*dropouts(run)}


def test_a_dropout_that_comes_out_otherwise_is_not_made_again(
    replaying: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays, "FROM_MASK", torch.ops.aten.masked_fill.Scalar)
    run = trained(DROPPED)
    assert len(dropouts(run)) == BLOCKS
    assert not any(run.trace.ops[at].replayable for at in dropouts(run))


@pytest.mark.gpu
@pytest.mark.parametrize("step", [plain, autocast], ids=["fp32", "bf16"])
def test_a_gpu_scales_what_a_dropout_has_drawn_to_the_same_bits(
    step: Callable[..., list[Tensor]], replaying: list[Plan]
) -> None:
    run = trained(DROPPED, step, "cuda")
    assert all(run.trace.ops[at].shortcut is not None for at in dropouts(run))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_compiler_gets_the_bits_of_the_kernel_written_out(dtype: torch.dtype) -> None:
    x, mask = torch.randn(1 << 12).to(dtype), torch.rand(1 << 12) < SHARE
    for share in (0.1, SHARE, 0.5):
        scale = 1 / (1 - share)
        kernel = replays.FROM_MASK(x, mask, scale)
        assert torch.equal(replays.from_mask(x, mask, scale), kernel)
