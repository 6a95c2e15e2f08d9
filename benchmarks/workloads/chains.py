"""Chains of convolutions: AlexNet, OverFeat (fast) and the VGG family, in stages."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from benchmarks.workloads.base import Setting, Workload, image_workload

# Convolutions in each of the five groups, by the name that the vDNN paper uses; its "VGG-16" has
# 16 convolutions and is torchvision's vgg19. Each further hundred layers are twenty a group.
VGG_GROUPS = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
_VGG_CHANNELS = (64, 128, 256, 512, 512)


class Chain(nn.Module):
    """Stages of convolutions, then a classifier."""

    def __init__(self, stages: list[nn.Sequential], pool: nn.Module, head: nn.Sequential) -> None:
        super().__init__()
        self.features = nn.Sequential(*stages)
        self.pool = pool
        self.classifier = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.pool(self.features(x)).flatten(1))

    def blocks(self) -> tuple[str, ...]:
        return tuple(f"features.{index}" for index in range(len(self.features)))


def _head(widths: tuple[int, ...], dropout_first: bool) -> nn.Sequential:
    """Linear layers with dropout before (AlexNet, OverFeat) or after each but the last (VGG)."""
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(widths[:-1]):
        linear = [nn.Linear(wide, narrow), nn.ReLU(inplace=True)]
        layers += [nn.Dropout(0.5), *linear] if dropout_first else [*linear, nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.Linear(*widths[-2:]))


def _conv(
    channels: tuple[int, int], kernel: int, stride: int = 1, padding: int = 0
) -> list[nn.Module]:
    return [nn.Conv2d(*channels, kernel, stride, padding), nn.ReLU(inplace=True)]


def alexnet(setting: Setting, batch: int = 1024) -> Workload:
    """AlexNet in one tower, as torchvision has it."""
    stages = [
        nn.Sequential(*_conv((3, 64), 11, 4, 2), nn.MaxPool2d(3, 2)),
        nn.Sequential(*_conv((64, 192), 5, 1, 2), nn.MaxPool2d(3, 2)),
        nn.Sequential(
            *_conv((192, 384), 3, 1, 1),
            *_conv((384, 256), 3, 1, 1),
            *_conv((256, 256), 3, 1, 1),
            nn.MaxPool2d(3, 2),
        ),
    ]
    head = _head((256 * 6 * 6, 4096, 4096, 1000), dropout_first=True)
    model = Chain(stages, nn.AdaptiveAvgPool2d(6), head)
    return image_workload(model, setting, (batch, 224), model.blocks())


def overfeat(setting: Setting, batch: int = 128) -> Workload:
    """OverFeat, the fast model (Sermanet et al. 2013, table 1)."""
    stages = [
        nn.Sequential(*_conv((3, 96), 11, 4), nn.MaxPool2d(2)),
        nn.Sequential(*_conv((96, 256), 5), nn.MaxPool2d(2)),
        nn.Sequential(
            *_conv((256, 512), 3, 1, 1),
            *_conv((512, 1024), 3, 1, 1),
            *_conv((1024, 1024), 3, 1, 1),
            nn.MaxPool2d(2),
        ),
    ]
    head = _head((1024 * 6 * 6, 3072, 4096, 1000), dropout_first=True)
    model = Chain(stages, nn.Identity(), head)
    return image_workload(model, setting, (batch, 231), model.blocks())


def vgg(setting: Setting, batch: int = 256, depth: int = 19) -> Workload:
    """VGG of 16 or 19 layers, or of 116, 216, 316, 416 convolutions as in the vDNN paper."""
    return _vgg(setting, (batch, 224), _groups(depth), _VGG_CHANNELS)


def _groups(depth: int) -> tuple[int, ...]:
    if depth in VGG_GROUPS:
        return VGG_GROUPS[depth]
    hundreds, rest = divmod(depth, 100)
    if rest != 16:
        raise ValueError(f"there is no VGG-{depth}: 16, 19, 116, 216, 316, …")
    return tuple(count + 20 * hundreds for count in VGG_GROUPS[19])


def _vgg(
    setting: Setting, shape: tuple[int, int], groups: tuple[int, ...], channels: tuple[int, ...]
) -> Workload:
    stages, before = [], 3
    for count, wide in zip(groups, channels, strict=True):
        layers: list[nn.Module] = []
        for _ in range(count):
            layers += _conv((before, wide), 3, 1, 1)
            before = wide
        stages.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
    full = channels == _VGG_CHANNELS
    widths = (before * 49, 4096, 4096, 1000) if full else (before * 49, 32, 32, 1000)
    model = Chain(stages, nn.AdaptiveAvgPool2d(7), _head(widths, dropout_first=False))
    for module in model.modules():
        # torchvision's initialisation; with torch's own a VGG-416 gives nothing but its biases.
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(module.bias)
    return image_workload(model, setting, shape, model.blocks())


def toy_vgg(setting: Setting, groups: tuple[int, int, int] = (1, 2, 2)) -> Workload:
    """A chain of narrow convolutions in three stages."""
    return _vgg(setting, (4, 56), groups, (4, 8, 8))


def toy_alexnet(setting: Setting) -> Workload:
    """A wide stride first, pools that overlap, and dropout before the linear layers."""
    stages = [
        nn.Sequential(*_conv((3, 8), 11, 4, 2), nn.MaxPool2d(3, 2)),
        nn.Sequential(*_conv((8, 16), 3, 1, 1), *_conv((16, 8), 3, 1, 1), nn.MaxPool2d(3, 2)),
    ]
    model = Chain(stages, nn.AdaptiveAvgPool2d(3), _head((72, 32, 32, 1000), dropout_first=True))
    return image_workload(model, setting, (4, 64), model.blocks())


def toy_overfeat(setting: Setting) -> Workload:
    """As AlexNet's, with pools that do not overlap and convolutions without padding."""
    stages = [
        nn.Sequential(*_conv((3, 8), 11, 4), nn.MaxPool2d(2)),
        nn.Sequential(*_conv((8, 16), 3), *_conv((16, 16), 3, 1, 1), nn.MaxPool2d(2)),
    ]
    model = Chain(stages, nn.Identity(), _head((64, 32, 32, 1000), dropout_first=True))
    return image_workload(model, setting, (4, 63), model.blocks())
