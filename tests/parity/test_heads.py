"""One long sequence whose attention makes the matrix: `auto` runs it in slices of heads."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import belady
from belady.errors import InfeasibleBudgetError
from belady.ir.run import Run
from belady.ir.trace import Tier
from belady.sections import headwise
from belady.sections.heads import Heads
from tests.support import training as steps
from tests.support.models import Task
from tests.support.training import SAMPLES, Step, Training, footprint, plain, smallest

WIDTH, HEADS, LENGTH, CLASSES = 32, 8, 128, 5
MATRIX = HEADS * LENGTH * LENGTH
ITERATIONS = range(6)
PLAIN = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headwise, "_LEAST_SLICE", 1 << 16)


class Attention(nn.Module):
    """With slopes that are learnt: no fused kernel of a CPU gives the gradient of a mask."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.mix, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.slopes = nn.Parameter(torch.randn(HEADS, 1, 1))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.mix(x).view(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        bias = self.slopes * torch.arange(t, dtype=x.dtype).div(t)
        seen = F.scaled_dot_product_attention(q, k, v, bias, self.dropout)
        return self.project(seen.transpose(1, 2).reshape(b, t, c))


class Fused(Attention):
    """The slopes are given."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes.requires_grad_(False)


class Multihead(nn.MultiheadAttention):
    """The module of PyTorch, by ordinary ops."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return super().forward(x, x, x, need_weights=False)[0]


class Encoder(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return super().forward(x)


class Checkpointed(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Layer(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module], wide: int) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(WIDTH), attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mlp(x)


class Reader(nn.Module):
    def __init__(self, layers: list[nn.Module], dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def task(
    attention: Callable[[], nn.Module] = Attention,
    dtype: torch.dtype = torch.float32,
    length: int = LENGTH,
    wide: int = WIDTH,
    layers: int = 1,
) -> Task:
    def models() -> list[nn.Module]:
        return [Reader([Layer(attention, wide) for _ in range(layers)], dtype)]

    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = length if size == SAMPLES else length - 28
        x = torch.randn(1, tokens, WIDTH, generator=generator).to(dtype)
        return x, torch.randint(0, CLASSES, (1,), generator=generator)

    def loss(result: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(result.float(), target)

    return Task("reader", models, batch, loss)


def trained(
    of: Task,
    share: float,
    step: Step = plain,
    policy: str = "auto",
    refusal: InfeasibleBudgetError | None = None,
) -> tuple[Training, Training, Run]:
    """In slices within a share of what the floor needs, and plainly."""
    budget = int(share * (refusal or smallest(of, step)).smallest_bytes)
    training = Training(of)
    with belady.virtualize(training.models, budget, policy=policy) as vm:
        training.run(step, ITERATIONS)
        run, report = vm.run(), vm.report()
    assert F.scaled_dot_product_attention is PLAIN
    assert run is not None
    assert run.measured is not None
    assert run.measured.peak(Tier.DEVICE) <= budget
    assert run.plan.numerics == ("sections",)
    assert any("scaled_dot_product_attention runs in slices of heads" in it for it in run.notes)
    assert "slices of heads" in report
    return training, Training(of).run(step, ITERATIONS), run


def assert_alike(found: Training, expected: Training, tolerance: float) -> None:
    for one, two in zip(found.losses, expected.losses, strict=True):
        torch.testing.assert_close(one, two, rtol=tolerance, atol=0.0)
    for (name, one), two in zip(
        found.model.named_parameters(), expected.model.parameters(), strict=True
    ):
        gap, largest = (one - two).abs().max().item(), two.abs().max().item()
        assert gap <= tolerance * largest, name


@pytest.mark.parametrize("attention", [Attention, Multihead, Encoder, Checkpointed])
@pytest.mark.parametrize("policy", ["auto", "hybrid", "hybrid_cheap"])
def test_a_long_sequence_over_the_budget_trains(
    attention: Callable[[], nn.Module], policy: str
) -> None:
    # Calls that follow one another, where most is done to find the slices.
    of = task(attention, layers=2 if policy == "auto" else 1)
    refusal = smallest(of)
    assert "softmax" in str(refusal)
    training, expected, run = trained(of, 0.35, policy=policy, refusal=refusal)
    assert_alike(training, expected, 1e-5)
    largest = max(
        run.trace.storages[value.storage].nbytes
        for value in run.trace.values
        if run.trace.ops[max(value.producer, 0)].name.startswith("aten._safe_softmax")
    )
    assert largest == 4 * MATRIX // HEADS


def test_without_slices_of_heads_that_budget_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    of = task()
    budget = int(0.35 * smallest(of).smallest_bytes)
    monkeypatch.setattr(Heads, "attach", lambda self: None)
    training = Training(of)
    vm = belady.virtualize(training.models, budget)
    with vm, pytest.raises(InfeasibleBudgetError, match="softmax"):
        training.loss(0)


def test_the_peak_falls_by_what_other_heads_had() -> None:
    of = task()
    floor = (refusal := smallest(of)).smallest_bytes
    # Scores, weights and a gradient, all at once, of six heads of eight.
    saved = 3 * 4 * MATRIX * 6 // 8
    trained(of, (floor - saved) / floor, refusal=refusal)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)], ids=str
)
def test_other_numbers(dtype: torch.dtype, tolerance: float) -> None:
    training, expected, _ = trained(task(dtype=dtype), 0.4)
    assert_alike(training, expected, tolerance)


@pytest.mark.parametrize(
    "step",
    [steps.accumulating, steps.short_at_the_end, steps.evaluating],
    ids=lambda step: step.__name__,
)
def test_habits_of_training(step: Step) -> None:
    training, expected, _ = trained(task(), 0.4, step)
    assert_alike(training, expected, 1e-5)


def test_autocast() -> None:
    training, expected, _ = trained(task(), 0.4, steps.autocast)
    assert_alike(training, expected, 2e-2)


def test_a_step_that_is_run_again_after_the_device_ran_out() -> None:
    of = task()
    training, ran_out = Training(of), [ITERATIONS[2], ITERATIONS[-1]]

    def closure(index: int) -> Tensor:
        training.optimizer.zero_grad()
        loss = training.loss(index)
        if index in ran_out:
            ran_out.remove(index)
            raise torch.OutOfMemoryError("made up")
        loss.backward()
        return loss.detach()

    with belady.virtualize(training.models, int(0.4 * smallest(of).smallest_bytes)) as vm:
        for index in ITERATIONS:
            training.losses.append(vm.step(partial(closure, index)))
            training.optimizer.step()
        assert "slices of heads" in vm.report()
    assert not ran_out
    assert_alike(training, Training(of).run(plain, ITERATIONS), 1e-5)


def test_an_mlp_runs_in_slices_of_tokens_beside_it() -> None:
    of = task(length=4 * LENGTH, wide=32 * WIDTH, layers=1)
    budget = int(0.27 * smallest(of).smallest_bytes)
    training = Training(of)
    with belady.virtualize(training.models, budget) as vm:
        training.run(plain, ITERATIONS)
        report = vm.report()
    assert "slices of heads" in report
    assert re.search(r"layers\.0\.mlp.* slices along the tokens", report)
    assert_alike(training, Training(of).run(plain, ITERATIONS), 1e-4)


class Patches(nn.Module):
    """Convolutions, which can be cut along the batch alone, and attention of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(8), nn.Flatten(2))
        )
        self.slopes, self.head = nn.Parameter(torch.randn(2, 1, 1)), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).mT.unflatten(-1, (2, 16)).transpose(1, 2)
        bias = self.slopes * torch.arange(x.shape[2], dtype=x.dtype)
        return self.head(F.scaled_dot_product_attention(x, x, x, bias).mean(2).flatten(1))


def test_attention_whose_slices_hinder_those_along_the_batch_runs_as_it_is() -> None:
    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        # With one more there would be more slices.
        size -= 1
        x = torch.randn(size, 1, 64, 64, generator=generator)
        return x, torch.randint(0, CLASSES, (size,), generator=generator)

    of = Task("patches", lambda: [Patches()], batch)
    training = Training(of)
    with belady.virtualize(training.models, int(0.4 * smallest(of).smallest_bytes)) as vm:
        training.run(plain, ITERATIONS)
        report = vm.report()
        assert F.scaled_dot_product_attention is PLAIN
    assert "slices along the batch" in report
    assert "slices of heads" not in report
    assert_alike(training, Training(of).run(plain, ITERATIONS), 1e-5)


def test_with_exact_numbers_nothing_is_cut() -> None:
    of = task()
    training = Training(of)
    vm = belady.virtualize(training.models, int(0.35 * smallest(of).smallest_bytes), exact=True)
    with vm, pytest.raises(InfeasibleBudgetError, match="softmax"):
        training.loss(0)
    assert F.scaled_dot_product_attention is PLAIN


@pytest.mark.parametrize("attention", [Fused, partial(Attention, 0.2)], ids=["fused", "dropout"])
def test_what_is_not_cut_keeps_every_bit(attention: Callable[[], nn.Module]) -> None:
    of = task(attention)
    training = Training(of)
    with belady.virtualize(training.models, 2 * smallest(of).smallest_bytes) as vm:
        training.run(plain, ITERATIONS)
        run = vm.run()
    assert run is not None
    assert run.plan.numerics == ()
    assert not any("heads" in note for note in run.notes)
    expected = Training(of).run(plain, ITERATIONS)
    assert all(map(torch.equal, training.losses, expected.losses))


def test_a_root_that_comes_second_is_judged_when_it_was_observed() -> None:
    def chain() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Linear(WIDTH, WIDTH), Reader([Layer(Attention, WIDTH)], torch.float32)]

    def gradients(models: list[nn.Module]) -> list[Tensor]:
        x = torch.randn(1, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
        for model in models:
            model.zero_grad()
        models[1](models[0](x)).square().sum().backward()
        found = [it.grad for model in models for it in model.parameters()]
        assert all(it is not None for it in found)
        return [it for it in found if it is not None]

    models, budget = chain(), int(0.7 * smallest(task(layers=1)).smallest_bytes)
    with belady.virtualize(models, budget) as vm:
        for _ in ITERATIONS:
            found = gradients(models)
        run = vm.run()
    assert run is not None
    assert run.plan.numerics == ("sections",)
    for one, other in zip(found, gradients(chain()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_kinds_without_slices_have_every_bit() -> None:
    of, few = task(), task(length=16)
    training, short = Training(of), Training(few)
    short.models, short.optimizers = training.models, training.optimizers
    with belady.virtualize(training.models, int(0.4 * smallest(of).smallest_bytes)) as vm:
        training.run(plain, ITERATIONS)
        assert (run := vm.run()) is not None
        assert run.plan.numerics == ("sections",)
        short.run(plain, ITERATIONS)
        assert (run := vm.run()) is not None
        assert run.plan.numerics == ()


@pytest.mark.parametrize("attention", [Attention, Checkpointed])
def test_what_others_run_is_as_it_was(attention: Callable[[], nn.Module]) -> None:
    of = task(attention)
    budget = int(0.4 * smallest(of).smallest_bytes)
    training, unmanaged, exact = Training(of), Training(of), Training(of)
    expected = Training(of).run(plain, ITERATIONS)
    with belady.virtualize(training.models, budget):
        training.run(plain, range(2))
        assert F.scaled_dot_product_attention is not PLAIN
        unmanaged.run(plain, ITERATIONS)
        with belady.virtualize(exact.models, "1GiB", exact=True) as vm:
            exact.run(plain, ITERATIONS)
            assert (run := vm.run()) is not None
    assert run.plan.numerics == ()
    for it in (unmanaged, exact):
        assert all(map(torch.equal, it.losses, expected.losses))


@pytest.mark.parametrize("options", [{"exact": True}, {"policy": "floor"}], ids=str)
def test_another_budget_is_judged_by_what_will_run(options: dict[str, Any]) -> None:
    of = task()
    budget = int(0.4 * smallest(of).smallest_bytes)
    training, refused, also = Training(of), Training(of), Training(of)
    with belady.virtualize(training.models, budget):
        training.run(plain, range(2))
        vm = belady.virtualize(refused.models, budget, **options)
        with vm, pytest.raises(InfeasibleBudgetError, match="softmax"):
            refused.loss(0)
        with belady.virtualize(also.models, budget):
            also.run(plain, ITERATIONS)
    assert_alike(also, Training(of).run(plain, ITERATIONS), 1e-5)


def test_where_everything_fits_nothing_changes() -> None:
    of = task()
    training = Training(of)
    with belady.virtualize(training.models, "1GiB") as vm:
        training.run(plain, ITERATIONS)
        run = vm.run()
        assert F.scaled_dot_product_attention is PLAIN
    assert run is not None
    assert run.plan.numerics == ()
    assert all(map(torch.equal, training.losses, Training(of).run(plain, ITERATIONS).losses))


def test_afterwards_everything_is_as_it_was() -> None:
    of = task()
    training = Training(of).run(plain, range(1))
    before = footprint(training.model.modules())
    with belady.virtualize(training.models, int(0.4 * smallest(of).smallest_bytes)):
        training.run(plain, range(2))
        assert F.scaled_dot_product_attention is not PLAIN
    assert F.scaled_dot_product_attention is PLAIN
    assert footprint(training.model.modules()) == before
