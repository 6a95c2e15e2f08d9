"""Handwritten digits, a residual network, and training it as anyone would: no belady in here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from belady.errors import MissingExtraError

Report = Callable[[str], None]

BATCH = 256
IMAGE = 16
CHANNELS = {"cpu": 16, "cuda": 128}
TRAINING_SHARE = 0.8
LEARNING_RATE = 5e-3
# Few iterations: running statistics must follow the weights faster than by default.
NORM_MOMENTUM = 0.3


@dataclass(frozen=True)
class Digits:
    """Images of handwritten digits and what they show, on the device of training."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Full batches in an order that is always the same, without end."""
        generator = torch.Generator().manual_seed(1)
        count = len(self.images)
        while True:
            order = torch.randperm(count, generator=generator).to(self.images.device)
            for start in range(0, count - BATCH + 1, BATCH):
                chosen = order[start : start + BATCH]
                yield self.images[chosen], self.labels[chosen]


def load_digits(device: torch.device) -> Digits:
    """Digits that come with scikit-learn, enlarged and shuffled.

    Raises
    ------
    MissingExtraError
        If scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise MissingExtraError(
            "the demonstration needs scikit-learn for its images: pip install 'belady[demo]'"
        ) from error
    data: Any = datasets.load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    images = F.interpolate(images, (IMAGE, IMAGE), mode="bilinear")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order].to(device), torch.tensor(data.target)[order].to(device)
    first = int(TRAINING_SHARE * len(images))
    return Digits(images[:first], labels[:first], images[first:], labels[first:])


class DigitNet(nn.Module):
    """A small residual network."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = _convolution(1, channels, 3)
        self.blocks = nn.Sequential(
            Block(channels, channels),
            Block(channels, channels),
            Block(channels, 2 * channels, stride=2),
            Block(2 * channels, 2 * channels),
        )
        self.head = nn.Linear(2 * channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Score each digit."""
        # Each name is used again: what no name holds any more can leave the device.
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x.mean((2, 3)))
        return scores


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, channels: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.first = _convolution(channels, outputs, 3, stride)
        self.second = _convolution(outputs, outputs, 3)
        same = channels == outputs and stride == 1
        self.around = nn.Identity() if same else _convolution(channels, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Add both ways."""
        return F.relu(self.second(F.relu(self.first(x))) + self.around(x))


def _convolution(channels: int, outputs: int, kernel: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, outputs, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(outputs, momentum=NORM_MOMENTUM),
    )


def _silent(_: str) -> None:
    pass


class Training:
    """One network, its optimizer, and what came of them; always from the same seed.

    Attributes
    ----------
    losses, seconds
        One each iteration.
    """

    def __init__(self, digits: Digits) -> None:
        self._digits = digits
        self._batches = digits.batches()
        device = digits.images.device
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            self.model = DigitNet(CHANNELS[device.type]).to(device)
        self._optimizer = torch.optim.Adam(self.model.parameters(), LEARNING_RATE)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def run(self, iterations: int, report: Report = _silent) -> Training:
        """Train for so many iterations; ``report`` is told of every tenth."""
        for index in range(1, iterations + 1):
            begun = perf_counter()
            images, labels = next(self._batches)
            loss = F.cross_entropy(self.model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.losses.append(loss.item())
            self.seconds.append(perf_counter() - begun)
            if index % 10 == 0 or index == iterations:
                report(f"  iteration {index} of {iterations}: loss {self.losses[-1]:.3f}")
        return self

    def accuracy(self) -> float:
        """Share of the test images that are recognised."""
        self.model.eval()
        with torch.no_grad():
            found = self.model(self._digits.test_images).argmax(1)
        self.model.train()
        return float((found == self._digits.test_labels).float().mean())

    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, copied to the host."""
        return {name: t.detach().cpu().clone() for name, t in self.model.state_dict().items()}

    @property
    def typical_seconds(self) -> float:
        """Median duration of the later half of the iterations."""
        return median(self.seconds[len(self.seconds) // 2 :])
