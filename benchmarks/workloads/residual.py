"""Residual networks, as torchvision has them, of any depth."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.workloads.base import Setting, Workload, image_workload

# Bottlenecks in each stage. Deeper than 152: more of them in the third, where most are anyway; the
# Layrub paper does not say where its ResNet-1517 has them.
_STAGES = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
_EXPANSION = 4


class Bottleneck(nn.Module):
    """Three convolutions, and a way around them."""

    def __init__(self, channels: tuple[int, int], stride: int) -> None:
        super().__init__()
        before, inner = channels
        after = inner * _EXPANSION
        self.conv1 = nn.Conv2d(before, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, after, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or before != after:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        around = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        x += around
        return self.relu(x)


class ResNet(nn.Module):
    """A stem, four stages of bottlenecks, and a linear classifier."""

    def __init__(self, stages: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        before = width
        for number, count in enumerate(stages):
            inner = width * 2**number
            blocks = []
            for index in range(count):
                stride = 2 if number and not index else 1
                blocks.append(Bottleneck((before, inner), stride))
                before = inner * _EXPANSION
            setattr(self, f"layer{number + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(before, 1000)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet(setting: Setting, batch: int = 256, depth: int = 50) -> Workload:
    """ResNet with bottlenecks; ``depth`` is 50, 101, 152 or any 3 n + 2 beyond."""
    stages = _STAGES.get(depth) or (3, 8, (depth - 2) // 3 - 14, 3)
    if 3 * sum(stages) + 2 != depth or depth < min(_STAGES):
        raise ValueError(f"there is no ResNet-{depth}: 50, 101, 152, or 3 n + 2 beyond")
    return _resnet(setting, (batch, 224), stages, 64)


def toy_resnet(setting: Setting, stages: tuple[int, int, int, int] = (2, 1, 1, 1)) -> Workload:
    """A few narrow bottlenecks in four stages."""
    return _resnet(setting, (8, 64), stages, 4)


def _resnet(
    setting: Setting, shape: tuple[int, int], stages: tuple[int, ...], width: int
) -> Workload:
    blocks = tuple(
        f"layer{stage}.{index}" for stage, count in enumerate(stages, 1) for index in range(count)
    )
    return image_workload(ResNet(stages, width), setting, shape, blocks)
