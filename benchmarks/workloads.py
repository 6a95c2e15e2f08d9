"""Workloads: one function each; shapes, seeds, precision and memory format are set here alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Setting:
    """How a workload is run.

    ``precision`` is fp32 (tf32 off), tf32 or bf16 (autocast); ``channels_last`` the memory format.
    """

    precision: str = "tf32"
    channels_last: bool = False
    device: str = "cuda"

    def apply(self) -> None:
        """Set the global switches of torch."""
        tf32 = self.precision == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cudnn.benchmark = True

    def autocast(self) -> AbstractContextManager[object]:
        """Context of the forward."""
        if self.precision == "bf16":
            return torch.autocast(self.device, torch.bfloat16)
        return nullcontext()

    def format(self) -> torch.memory_format:
        """Memory format of images and weights."""
        return torch.channels_last if self.channels_last else torch.contiguous_format


@dataclass(frozen=True)
class Workload:
    """A model, its optimizer, and batches that never end."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]]


def _images(
    build: Callable[[], nn.Module], batch: int, size: int, setting: Setting, classes: int = 1000
) -> Workload:
    torch.manual_seed(0)
    device = torch.device(setting.device)
    model = build().to(device, memory_format=setting.format())  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images = torch.randn(batch, 3, size, size, device=device).to(memory_format=setting.format())
    labels = torch.randint(0, classes, (batch,), device=device)

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield images, labels

    return Workload(model, optimizer, batches())


def vgg19(setting: Setting, batch: int = 256) -> Workload:
    """The 19-layer VGG, "VGG-16" in the vDNN paper (16 convolutions)."""
    from torchvision.models import vgg19 as build

    return _images(lambda: build(weights=None), batch, 224, setting)


def vgg16(setting: Setting, batch: int = 256) -> Workload:
    """VGG-16 (13 convolutions)."""
    from torchvision.models import vgg16 as build

    return _images(lambda: build(weights=None), batch, 224, setting)


def resnet50(setting: Setting, batch: int = 256) -> Workload:
    """ResNet-50."""
    from torchvision.models import resnet50 as build

    return _images(lambda: build(weights=None), batch, 224, setting)


def googlenet(setting: Setting, batch: int = 512) -> Workload:
    """GoogLeNet without auxiliary classifiers."""
    from torchvision.models import googlenet as build

    return _images(
        lambda: build(weights=None, aux_logits=False, init_weights=False), batch, 224, setting
    )


def alexnet(setting: Setting, batch: int = 1024) -> Workload:
    """AlexNet."""
    from torchvision.models import alexnet as build

    return _images(lambda: build(weights=None), batch, 224, setting)


class _ToyBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.second(functional.relu(self.norm(self.first(x))))
        return functional.relu(x + inner)


def toy(setting: Setting, batch: int = 8) -> Workload:
    """A residual network small enough for a CPU."""

    def build() -> nn.Module:
        blocks = [_ToyBlock(8) for _ in range(3)]
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 10),
        )

    return _images(build, batch, 32, setting, classes=10)


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "toy": toy,
    "alexnet": alexnet,
    "googlenet": googlenet,
    "vgg16": vgg16,
    "vgg19": vgg19,
    "resnet50": resnet50,
}
