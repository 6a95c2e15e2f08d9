"""What a workload is and how it is run; precision, memory format and batches are set here alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from itertools import repeat
from typing import Any

import torch
from torch import nn

Arguments = tuple[Any, ...]
Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Setting:
    """How a workload is run.

    ``precision`` is fp32 (tf32 off), tf32 or bf16 (autocast); ``channels_last`` the memory format;
    ``cudnn_benchmark`` whether cuDNN times its algorithms and takes the fastest.
    """

    precision: str = "tf32"
    channels_last: bool = False
    device: str = "cuda"
    cudnn_benchmark: bool = True

    def apply(self) -> None:
        """Set the global switches of torch."""
        tf32 = self.precision == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cudnn.benchmark = self.cudnn_benchmark

    def autocast(self) -> AbstractContextManager[object]:
        """Context of forward and loss."""
        if self.precision == "bf16":
            return torch.autocast(self.device, torch.bfloat16)
        return nullcontext()

    def format(self) -> torch.memory_format:
        """Memory format of images and weights."""
        return torch.channels_last if self.channels_last else torch.contiguous_format


@dataclass(frozen=True)
class Workload:
    """A model, its optimizer, and batches that never end.

    Attributes
    ----------
    batches
        Arguments of the model's call, and the loss of what it returns.
    blocks
        Names of the modules that a user would checkpoint, one by one.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[tuple[Arguments, Loss]]
    setting: Setting
    blocks: tuple[str, ...] = ()

    def persistent_tensors(self) -> Iterator[torch.Tensor]:
        """Parameters, buffers, gradients, optimizer state and the batch."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield from (p.grad for p in self.model.parameters() if p.grad is not None)
        for state in self.optimizer.state.values():
            yield from (item for item in state.values() if isinstance(item, torch.Tensor))
        arguments, _ = next(self.batches)
        yield from (item for item in arguments if isinstance(item, torch.Tensor))


@dataclass(frozen=True)
class Recipe:
    """How to make a workload.

    ``build`` takes a `Setting` and sizes; ``toy`` makes the same kind of network small enough for
    a CPU, without any package but torch, and has one size. ``sizes`` are set for ``build`` where
    its own defaults are of another network.
    """

    build: Callable[..., Workload]
    toy: Callable[[Setting], Workload]
    sizes: Mapping[str, int] = field(default_factory=dict)

    def make(
        self, setting: Setting, sizes: Mapping[str, int], toy: bool, seed: int = 0
    ) -> Workload:
        """Build it from a seed, on the device of the setting."""
        if toy and sizes:
            raise ValueError(f"networks at toy size have one size, not {dict(sizes)}")
        torch.manual_seed(seed)
        with torch.device(setting.device):
            return self.toy(setting) if toy else self.build(setting, **{**self.sizes, **sizes})

    def defaults(self) -> dict[str, int]:
        """Every size that it has, as it is unless given."""
        _, *sizes = signature(self.build).parameters.values()
        return {it.name: it.default for it in sizes} | dict(self.sizes)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of convolutional networks."""
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of transformers."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def image_workload(
    model: nn.Module,
    setting: Setting,
    shape: tuple[int, int],
    blocks: tuple[str, ...] = (),
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    classes: int = 1000,
) -> Workload:
    """Classification of one batch of random images; ``shape`` is batch and edge length."""
    batch, size = shape
    model = model.to(memory_format=setting.format())  # type: ignore[call-overload]
    images = torch.randn(batch, 3, size, size).to(memory_format=setting.format())
    labels = torch.randint(0, classes, (batch,))

    def loss(output: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, labels)

    return Workload(model, optimizer(model), repeat(((images,), loss)), setting, blocks)


def token_workload(
    model: nn.Module,
    setting: Setting,
    shape: tuple[int, int],
    vocabulary: int,
    blocks: tuple[str, ...] = (),
) -> Workload:
    """Next-token prediction on one batch of random tokens; ``shape`` is batch and length."""
    batch, length = shape
    tokens = torch.randint(0, vocabulary, (batch, length + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(output: Any) -> torch.Tensor:
        logits = getattr(output, "logits", output)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Workload(model, adamw(model), repeat(((inputs,), loss)), setting, blocks)
