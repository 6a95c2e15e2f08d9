"""Transformers: ViT-L/16 (timm), GPT-2-medium (transformers), and Llama-shaped blocks (our own)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from benchmarks.workloads.base import (
    Setting,
    Workload,
    adamw,
    image_workload,
    token_workload,
)


def vit(setting: Setting, batch: int = 64) -> Workload:
    """ViT-L/16 at 224 pixels."""
    from timm import create_model

    model = create_model("vit_large_patch16_224", pretrained=False)
    blocks = tuple(f"blocks.{index}" for index in range(len(model.blocks)))
    return image_workload(model, setting, (batch, 224), blocks, adamw)


def gpt2(setting: Setting, batch: int = 8, length: int = 1024) -> Workload:
    """GPT-2-medium, 24 layers of 1,024."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=1024, n_layer=24, n_head=16, n_positions=length, use_cache=False)
    model = GPT2LMHeadModel(config).train()
    blocks = tuple(f"transformer.h.{index}" for index in range(config.n_layer))
    return token_workload(model, setting, (batch, length), config.vocab_size, blocks)


class Norm(nn.Module):
    """Root mean square normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), 1e-5)


class LlamaBlock(nn.Module):
    """Grouped attention with rotated positions, and a gated MLP."""

    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.heads, self.groups, self.head_width = heads, groups, width // heads
        self.before_attention, self.before_mlp = Norm(width), Norm(width)
        self.mix = nn.Linear(width, (heads + 2 * groups) * self.head_width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        counts = [self.heads, self.groups, self.groups]
        mixed = self.mix(self.before_attention(x)).unflatten(-1, (-1, self.head_width))
        query, key, value = (part.transpose(1, 2) for part in mixed.split(counts, dim=2))
        seen = functional.scaled_dot_product_attention(
            _turned(query, turns), _turned(key, turns), value, is_causal=True, enable_gqa=True
        )
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        inner = self.before_mlp(x)
        return x + self.down(functional.silu(self.gate(inner)) * self.up(inner))


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    cos, sin = turns.to(x.dtype)
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Llama(nn.Module):
    """Token embedding, blocks, norm and an untied head."""

    def __init__(self, vocabulary: int, length: int, layers: list[LlamaBlock], width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(layers)
        self.norm = Norm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        half = layers[0].head_width // 2
        angles = torch.arange(length)[:, None] * 500000.0 ** (-torch.arange(half) / half)
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.turns)
        return self.head(self.norm(x))


def llama(setting: Setting, batch: int = 4, length: int = 2048, layers: int = 16) -> Workload:
    """Blocks of the shape of Llama-3.2-1B with a vocabulary of 32,000."""
    blocks = [LlamaBlock(2048, 32, 8, 8192) for _ in range(layers)]
    return _llama(setting, Llama(32000, length, blocks, 2048), (batch, length), 32000)


def toy_llama(setting: Setting) -> Workload:
    """Three blocks of 32."""
    blocks = [LlamaBlock(32, 4, 2, 64) for _ in range(3)]
    return _llama(setting, Llama(64, 32, blocks, 32), (4, 32), 64)


def _llama(setting: Setting, model: Llama, shape: tuple[int, int], vocabulary: int) -> Workload:
    names = tuple(f"layers.{index}" for index in range(len(model.layers)))
    return token_workload(model, setting, shape, vocabulary, names)


class _Gpt2Block(nn.Module):
    """Attention and an MLP with biases, layer norms before and dropout after each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.mix(self.ln_1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.project(seen.transpose(1, 2).flatten(2)))
        inner = functional.gelu(self.up(self.ln_2(x)), approximate="tanh")
        return x + self.dropout(self.down(inner))


class _Gpt2(nn.Module):
    """Learned positions, and a head that has the weight of the embedding."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(_Gpt2Block(width, 4) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


def toy_gpt2(setting: Setting) -> Workload:
    """Three blocks of 32."""
    return token_workload(_Gpt2(64, 32, 32, 3), setting, (4, 32), 64, ("h.0", "h.1", "h.2"))


def toy_vit(setting: Setting) -> Workload:
    """Two encoder layers over patches of small images."""
    layers = [
        nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(2)
    ]
    model = nn.Sequential(
        nn.Conv2d(3, 32, 8, stride=8), nn.Flatten(2), _Swap(), *layers, _Mean(), nn.Linear(32, 1000)
    )
    return image_workload(model, setting, (4, 32), ("3", "4"), adamw)


class _Swap(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)


class _Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)
