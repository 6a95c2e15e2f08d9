"""Random numbers of captured graphs fall where those of plain PyTorch do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import belady
from tests.support.models import Task
from tests.support.training import Training, differences, plain

WIDTH, CLASSES, STEPS = 16, 5, 6

F = nn.functional
Draw = Callable[[Tensor], Tensor]


class Drawing(nn.Module):
    """A layer, numbers drawn for what it gives, and a head."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.draw = draw
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, steps: Tensor) -> Tensor:
        return self.head(self.draw(self.layer(steps)).sum(1))


class Frozen(Drawing):
    """What is drawn for comes from a graph that nobody differentiates."""

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.layer.requires_grad_(False)

    def forward(self, steps: Tensor) -> Tensor:
        drawn = self.draw(self.layer(steps))
        torch._dynamo.graph_break()
        return self.head(drawn.sum(1))


class Attending(nn.Module):
    """Attention whose result lies along its steps, before a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.25, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, steps: Tensor) -> Tensor:
        return self.head(self.layer(steps)[:, 0])


def along(draw: Draw) -> Draw:
    """``draw`` on a tensor whose second dimension lies outermost."""
    return lambda x: draw(x.transpose(0, 1)).transpose(0, 1)


def noise(x: Tensor) -> Tensor:
    """Noise that is written to every second column of a tensor."""
    wide = torch.empty(*x.shape[:-1], 2 * x.shape[-1], device=x.device)
    return x + wide[..., ::2].normal_()


def sequences(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    steps = torch.randn(size, STEPS, WIDTH, generator=generator)
    return steps, torch.randint(CLASSES, (size,), generator=generator)


def report_of(build: Callable[[], nn.Module], device: str) -> str:
    """What is reported of a training in captured graphs, which went as plain PyTorch's."""
    task = Task("drawing", lambda: [build()], sequences)
    expected = Training(task, device).run(plain, range(6)).outcome()
    training = Training(task, device)
    with belady.virtualize(training.model, "1GiB", engine="graph") as vm:
        assert differences(expected, training.run(plain, range(6)).outcome()) == []
        return vm.report()


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.dropout(x, 0.25),
        lambda x: F.alpha_dropout(x, 0.25, training=True),
        lambda x: F.rrelu(x, training=True),
        along(lambda x: x + torch.empty_like(x).normal_()),
        along(lambda x: x * torch.rand_like(x)),
        along(lambda x: F.gumbel_softmax(x)),
    ],
    ids=["dropout", "alpha", "rrelu", "normal", "uniform", "gumbel"],
)
def test_numbers_that_lie_as_what_they_are_for_are_drawn_in_graphs(draw: Draw, device: str) -> None:
    assert "not captured" not in report_of(lambda: Drawing(draw), device)


FALLING = {
    "dropout": along(lambda x: F.dropout(x, 0.25)),
    "alpha": along(lambda x: F.alpha_dropout(x, 0.25, training=True)),
    "rrelu": along(lambda x: F.rrelu(x, training=True)),
    "every second": noise,
}


@pytest.mark.parametrize("draw", FALLING.values(), ids=FALLING)
@pytest.mark.parametrize("model", [Drawing, Frozen])
def test_numbers_that_would_fall_to_other_elements_are_left_to_plain_pytorch(
    model: Callable[[Draw], nn.Module], draw: Draw
) -> None:
    assert "in another order" in report_of(lambda: model(draw), "cpu")


def test_where_a_dimension_of_one_lies_does_not_matter() -> None:
    def draw(x: Tensor) -> Tensor:
        image = (x[:, None] * 1.0).to(memory_format=torch.channels_last)
        return F.dropout(image, 0.25)[:, 0]

    assert "not captured" not in report_of(lambda: Drawing(draw), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("draw", FALLING.values(), ids=FALLING)
def test_numbers_are_those_of_plain_pytorch_on_a_gpu(draw: Draw) -> None:
    # Dropout is one op there, wherever its bytes lie.
    report_of(lambda: Drawing(draw), "cuda")


def test_a_transformer_with_dropout_has_the_bits_of_plain_pytorch() -> None:
    assert "in another order" in report_of(Attending, "cpu")
