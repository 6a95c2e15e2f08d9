"""One long sequence: modules whose ops are over the budget train in slices along its tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import belady
from belady.errors import InfeasibleBudgetError
from belady.ir.run import Run
from belady.ir.trace import Tier
from tests.support import training as steps
from tests.support.models import Task
from tests.support.training import SAMPLES, Step, Training, footprint, plain, smallest

WIDTH, HEADS, LENGTH, WORDS, LAYERS = 16, 2, 256, 11, 2
# Slices that did not do are cut anew, which is watched again.
ITERATIONS = range(7)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.mix(x).view(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        return self.project(self.seen(q, k, v).transpose(1, 2).reshape(b, t, c))

    def seen(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class ByHand(Attention):
    """Makes the matrix of all pairs of tokens."""

    def seen(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 8 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(8 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Feedforward(nn.Sequential):
    def __init__(self) -> None:
        wide = 8 * WIDTH
        super().__init__(nn.Linear(WIDTH, wide), nn.GELU(), nn.Dropout(0.1), nn.Linear(wide, WIDTH))


class Layer(nn.Module):
    def __init__(
        self,
        mlp: Callable[[], nn.Module] = Gated,
        norm: Callable[[int], nn.Module] = nn.RMSNorm,
        attention: Callable[[], nn.Module] = Attention,
    ) -> None:
        super().__init__()
        self.before, self.between = norm(WIDTH), norm(WIDTH)
        self.attention, self.mlp = attention(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.between(x))


class Language(nn.Module):
    """As long a sequence as it was made for, which it insists on."""

    def __init__(self, layer: Callable[[], nn.Module], dtype: torch.dtype) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        assert tokens.shape[1] <= LENGTH
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def task(
    layer: Callable[[], nn.Module] = Layer,
    dtype: torch.dtype = torch.float64,
    samples: int = 1,
    prepare: Callable[[Language], Language] = lambda model: model,
) -> Task:
    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        # A last one that is smaller is a shorter sequence.
        length = LENGTH if size == SAMPLES else LENGTH - 25
        tokens = torch.randint(WORDS, (samples, length + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    return Task("language", lambda: [prepare(Language(layer, dtype))], batch, loss_of)


def trained(of: Task, share: float, step: Step = plain) -> tuple[Training, Training, Run]:
    """In slices within a share of what the floor needs, and plainly."""
    refusal = smallest(of, step)
    assert ".mlp" in str(refusal)
    budget = int(share * refusal.smallest_bytes)
    training = Training(of)
    with belady.virtualize(training.models, budget) as vm:
        training.run(step, ITERATIONS)
        run, report = vm.run(), vm.report()
        cut = re.findall(
            r"layers\.(\d)\.mlp\S* (?:to \S+ run|runs) in \d+ slices along the ", report
        )
        assert cut == [str(layer) for layer in range(LAYERS)]
        assert len(re.findall("slices along the tokens, since", report)) == LAYERS
    assert all("forward" not in vars(module) for module in training.model.modules())
    assert run is not None
    assert run.measured is not None
    assert run.measured.peak(Tier.DEVICE) <= budget
    assert run.plan.numerics == ("sections",)
    return training, Training(of).run(step, ITERATIONS), run


LINEAR = partial(Layer, Feedforward, nn.LayerNorm)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize(
    ("layer", "share"), [(Layer, 0.7), (LINEAR, 0.85)], ids=["gated", "linear"]
)
def test_a_long_sequence_over_the_budget_trains_in_slices(
    layer: Callable[[], nn.Module], share: float, samples: int
) -> None:
    training, expected, _ = trained(task(layer, samples=samples), share)
    for one, two in zip(training.losses, expected.losses, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=0.0)


def gradients(training: Training) -> dict[str, Tensor]:
    training.loss(99).backward()
    return {name: it.grad for name, it in training.model.named_parameters() if it.grad is not None}


def test_gradients_are_those_of_the_whole_sequence() -> None:
    of = task()
    training, expected = Training(of), Training(of)
    with belady.virtualize(training.models, int(0.7 * smallest(of).smallest_bytes)) as vm:
        for _ in range(3):
            training.optimizer.zero_grad()
            found = gradients(training)
        assert "slices along the tokens" in vm.report()
    for name, gradient in gradients(expected).items():
        assert (found[name] - gradient).abs().max() <= 1e-12 * gradient.abs().max()


@pytest.mark.parametrize(
    "step",
    [steps.accumulating, steps.short_at_the_end, steps.evaluating],
    ids=lambda step: step.__name__,
)
def test_habits_of_training_give_the_numbers_of_the_whole_sequence(step: Step) -> None:
    training, expected, _ = trained(task(), 0.75, step)
    for one, two in zip(training.losses, expected.losses, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(
    ("step", "share", "tolerance"),
    [(plain, 0.75, 2e-5), (steps.autocast, 0.85, 2e-2)],
    ids=["float32", "bfloat16"],
)
def test_less_precise_numbers_stay_within_rounding(
    step: Step, share: float, tolerance: float
) -> None:
    training, expected, _ = trained(task(dtype=torch.float32), share, step)
    for one, two in zip(training.losses, expected.losses, strict=True):
        torch.testing.assert_close(one, two, rtol=tolerance, atol=0.0)


def adapted(model: Language) -> Language:
    """Trains little, so that all layers need as much as each other."""
    model.requires_grad_(False)
    model.words.requires_grad_()
    model.norm.requires_grad_()
    return model


def test_layers_that_need_as_much_as_each_other_are_all_cut() -> None:
    training, expected, _ = trained(task(prepare=adapted), 0.7)
    for one, two in zip(training.losses, expected.losses, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=0.0)


def test_afterwards_everything_is_as_it_was() -> None:
    of = task()
    training = Training(of).run(plain, range(1))
    before = footprint(training.model.modules())
    with belady.virtualize(training.models, int(0.7 * smallest(of).smallest_bytes)) as vm:
        training.run(plain, range(2))
        assert "forward" in vars(training.model.get_submodule("layers.0.mlp"))
        assert "slices along the tokens" in vm.report()
    assert footprint(training.model.modules()) == before
    assert all("forward" not in vars(module) for module in training.model.modules())


def test_with_exact_numbers_nothing_is_cut() -> None:
    of = task()
    budget = int(0.7 * smallest(of).smallest_bytes)
    training = Training(of)
    vm = belady.virtualize(training.models, budget, exact=True)
    with vm, pytest.raises(InfeasibleBudgetError, match=r"layers\.\d\.mlp"):
        training.loss(0)


def test_attention_that_makes_the_matrix_is_refused_with_its_reason() -> None:
    of = task(partial(Layer, attention=ByHand))
    refusal = smallest(of)
    assert ".attention" in str(refusal)
    training = Training(of)
    vm = belady.virtualize(training.models, int(0.5 * refusal.smallest_bytes))
    with vm, pytest.raises(InfeasibleBudgetError) as caught:
        training.loss(0)
    assert any("each token by itself" in note for note in caught.value.__notes__)
