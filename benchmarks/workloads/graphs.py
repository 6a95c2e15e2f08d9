"""Networks of many branches or many steps: GoogLeNet, an inception-like graph, an LSTM."""

from __future__ import annotations

from itertools import repeat

import torch
from torch import nn
from torch.nn import functional

from benchmarks.workloads.base import Setting, Workload, image_workload, sgd


def googlenet(setting: Setting, batch: int = 512) -> Workload:
    """GoogLeNet (with batch norm, as torchvision has it) without auxiliary classifiers."""
    from torchvision.models import googlenet as build

    model = build(weights=None, aux_logits=False, init_weights=False)
    blocks = tuple(name for name, _ in model.named_children() if name.startswith("inception"))
    return image_workload(model, setting, (batch, 224), blocks)


class Inception(nn.Module):
    """Four ways through, each with its norms, joined by concatenation alone."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        part = channels // 4
        self.branch1 = _normed(channels, part, 1)
        self.branch2 = nn.Sequential(_normed(channels, part, 1), _normed(part, part, 3))
        self.branch3 = nn.Sequential(_normed(channels, part, 1), _normed(part, part, 3))
        self.branch4 = nn.Sequential(
            nn.MaxPool2d(3, 1, 1, ceil_mode=True), _normed(channels, part, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


def _normed(before: int, after: int, kernel: int) -> nn.Sequential:
    convolution = nn.Conv2d(before, after, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after, eps=0.001), nn.ReLU(inplace=True))


def toy_googlenet(setting: Setting) -> Workload:
    """Three inception modules with a pool between them, and dropout before the classifier."""
    model = nn.Sequential(
        _normed(3, 8, 7),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        Inception(8),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        Inception(8),
        Inception(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(8, 1000),
    )
    return image_workload(model, setting, (4, 32), ("2", "4", "5"))


class Branches(nn.Module):
    """Four ways through, joined by concatenation, and a fifth, by a sum."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        part = channels // 4
        self.narrow = nn.Conv2d(channels, part, 1)
        self.wide = nn.Sequential(
            nn.Conv2d(channels, part, 1), nn.ReLU(), nn.Conv2d(part, part, 3, padding=1)
        )
        self.wider = nn.Sequential(
            nn.Conv2d(channels, part, 1), nn.ReLU(), nn.Conv2d(part, part, 5, padding=2)
        )
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(channels, part, 1))
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.narrow(x), self.wide(x), self.wider(x), self.pooled(x)], 1)
        return functional.relu(self.norm(joined)) + x


def dag(
    setting: Setting, batch: int = 128, size: int = 224, channels: int = 128, depth: int = 12
) -> Workload:
    """An inception-like graph of forks and joins at an eighth of the image's resolution."""
    model = nn.Sequential(
        nn.Conv2d(3, channels, 7, stride=8, padding=3),
        *(Branches(channels) for _ in range(depth)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, 1000),
    )
    blocks = tuple(str(index) for index in range(1, depth + 1))
    return image_workload(model, setting, (batch, size), blocks)


def toy_dag(setting: Setting) -> Workload:
    """Three modules of branches."""
    return dag(setting, batch=4, size=64, channels=8, depth=3)


class Chunk(nn.Module):
    """Some steps of a recurrent cell that others share."""

    def __init__(self, cell: nn.LSTMCell) -> None:
        super().__init__()
        self.cell = cell

    def forward(
        self, steps: torch.Tensor, hidden: torch.Tensor, carry: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for step in steps.unbind(0):
            hidden, carry = self.cell(step, (hidden, carry))
        return hidden, carry


class Unrolled(nn.Module):
    """One LSTM cell over a long sequence, step by step."""

    def __init__(self, width: int, chunks: int) -> None:
        super().__init__()
        cell = nn.LSTMCell(width, width)
        self.chunks = nn.ModuleList(Chunk(cell) for _ in range(chunks))
        self.head = nn.Linear(width, width)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        hidden = carry = torch.zeros_like(sequence[0])
        for chunk, steps in zip(self.chunks, sequence.chunk(len(self.chunks)), strict=True):
            hidden, carry = chunk(steps, hidden, carry)
        return self.head(hidden)


def lstm(setting: Setting, batch: int = 256, steps: int = 1000, width: int = 1024) -> Workload:
    """An LSTM unrolled step by step; a block is a twentieth of the steps."""
    chunks = 20
    model = Unrolled(width, chunks)
    sequence, target = torch.randn(steps, batch, width), torch.randn(batch, width)

    def loss(output: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(output, target)

    blocks = tuple(f"chunks.{index}" for index in range(chunks))
    return Workload(model, sgd(model), repeat(((sequence,), loss)), setting, blocks)


def toy_lstm(setting: Setting) -> Workload:
    """Forty steps of sixteen units."""
    return lstm(setting, batch=4, steps=40, width=16)
