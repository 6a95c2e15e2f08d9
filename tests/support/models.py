"""Small models of every shape that matters to saved tensors, and data that repeat exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CLASSES = 10
VOCABULARY = 64


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.first_norm(self.first(x)))
        return self.activation(self.second_norm(self.second(y)) + x)


class ResidualCNN(nn.Module):
    """Convolutions, batch norm, in-place activations, pooling indices, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            Residual(8),
            Residual(8),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(128, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(self.before_attention(x)).chunk(3, dim=-1)
        query, key, value = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in mixed)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class SmallGPT(nn.Module):
    """Attention, layer norm, and a head that shares the embedding's weight."""

    def __init__(self, width: int = 32, length: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(Block(width, 4), Block(width, 4))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens) + self.position)))


class Recurrent(nn.Module):
    """A fused LSTM and an unrolled cell, on one sequence."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.fused = nn.LSTM(width, width, num_layers=2, dropout=0.1, batch_first=True)
        self.cell = nn.LSTMCell(width, width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        sequence, _ = self.fused(self.embedding(tokens))
        state = None
        outputs = []
        for step in sequence.unbind(1):
            state = self.cell(step, state)
            outputs.append(state[0])
        return self.head(torch.stack(outputs, 1))


def comparable(model: nn.Module, device: str) -> nn.Module:
    """Take out of a model what plain PyTorch itself does not repeat on ``device``.

    cuDNN keeps the state of the dropout between a fused LSTM's layers for the whole process, and
    `torch.manual_seed` does not reset it (pytorch issues 74177 and 90168): two runs in one process
    drop other elements.
    """
    for part in model.modules():
        if device == "cuda" and isinstance(part, nn.RNNBase):
            part.dropout = 0.0
    return model


class Inception(nn.Module):
    """Forks, joins by concatenation and by sum, and a value that several branches save."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.narrow = nn.Conv2d(8, 8, 1)
        self.wide = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 5, padding=2))
        self.pooled = nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Conv2d(8, 8, 1), nn.Sigmoid())
        self.join = nn.Conv2d(24, 8, 1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).exp().clamp(max=4)
        branches = [self.narrow(x), self.wide(x), self.pooled(x) * x]
        joined = self.join(torch.cat(branches, 1)) + x.sqrt() * branches[0]
        return self.head(torch.tanh(joined).mean((2, 3)))


class TiedAndFrozen(nn.Module):
    """One layer called twice, one frozen, an expanded mask, and a buffer outside the state."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter = nn.Linear(16, width)
        self.shared = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width), persistent=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.shared(F.elu(self.enter(x.flatten(1, 2)), inplace=True)))
        mask = (x > 0).any(0, keepdim=True).expand_as(x)
        x = torch.where(mask, x, 0.5 * x) * self.scale
        x = self.frozen(F.gelu(self.shared(x))).mT.contiguous().mT
        return self.head(x.square().mean(1))


class Checkpointed(nn.Module):
    """Blocks that the user recomputes."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList([Residual(8), Residual(8)])
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        for block in self.blocks:
            x = checkpoint(
                lambda y, block=block: self.dropout(block(y)), x, use_reentrant=self.reentrant
            )
        return self.head(torch.relu(x).mean((2, 3)))


class Generator(nn.Sequential):
    """From noise to sequences of 24 points."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(8, 32), nn.BatchNorm1d(24), nn.LeakyReLU(0.2), nn.Linear(32, 16), nn.Tanh()
        )


class Critic(nn.Sequential):
    """A verdict on each point."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(16, 32), nn.LeakyReLU(0.2, inplace=True), nn.Dropout(0.2), nn.Linear(32, 1)
        )


@dataclass(frozen=True)
class Task:
    """A model to train: how to make it, its data, its loss.

    Attributes
    ----------
    models
        Makes the roots; the first is the one that plain training steps call.
    batch
        Input and target of a batch of that many samples, from a generator.
    """

    name: str
    models: Callable[[], list[nn.Module]]
    batch: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    loss: Callable[[Any, Tensor], Tensor] = F.cross_entropy

    def __str__(self) -> str:
        return self.name


def _images(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    images = torch.randn(size, 3, 16, 16, generator=generator)
    return images, torch.randint(CLASSES, (size,), generator=generator)


def _tokens(length: int) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(VOCABULARY, (size, length + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    return batch


def _noise(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    noise = torch.randn(size, 24, 8, generator=generator)
    return noise, torch.randn(size, 24, 16, generator=generator).tanh()


def _token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


CNN = Task("cnn", lambda: [ResidualCNN()], _images)
GPT = Task("gpt", lambda: [SmallGPT()], _tokens(16), _token_loss)
LSTM = Task("lstm", lambda: [Recurrent()], _tokens(6), _token_loss)
INCEPTION = Task("inception", lambda: [Inception()], _images)
TIED = Task("tied", lambda: [TiedAndFrozen()], _images)
REENTRANT = Task("reentrant", lambda: [Checkpointed(True)], _images)
REPLAYED = Task("replayed", lambda: [Checkpointed(False)], _images)
GAN = Task("gan", lambda: [Generator(), Critic()], _noise)

SINGLE = (CNN, GPT, LSTM, INCEPTION, TIED, REENTRANT, REPLAYED)
TASKS = (*SINGLE, GAN)
