"""Attention as libraries write it, all on sequences of ``WIDTH`` numbers a token."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LENGTH = 16, 4, 24
EACH = WIDTH // HEADS


class Permuted(nn.Module):
    """One projection, a permutation and `unbind`, as in timm."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.dropout = nn.Dropout(p)
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.mix(x).view(b, t, 3, HEADS, EACH).permute(2, 0, 3, 1, 4).unbind(0)
        seen = self.dropout((q @ k.transpose(-2, -1) * EACH**-0.5).softmax(-1))
        return self.project((seen @ v).transpose(1, 2).reshape(b, t, c))


class Contiguous(Permuted):
    """The permuted projection is copied, with the batch in its second dimension."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        mixed = self.mix(x).view(b, t, 3, HEADS, EACH).permute(2, 0, 3, 1, 4).contiguous()
        q, k, v = mixed[0] * 0.5, mixed[1], mixed[2]
        return self.project(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))


class Einsum(Permuted):
    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.mix(x).view(b, t, 3, HEADS, EACH).unbind(2)
        seen = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        return self.project(torch.einsum("bhqk,bkhd->bqhd", seen, v).reshape(b, t, c))


class Split(Permuted):
    """A causal mask that is a buffer, as in nanoGPT."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__(p)
        self.register_buffer("mask", torch.tril(torch.ones(1, 1, LENGTH, LENGTH)))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        parts = self.mix(x).split(WIDTH, dim=2)
        q, k, v = (it.view(b, t, HEADS, EACH).transpose(1, 2) for it in parts)
        seen = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        seen = seen.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        seen = self.dropout(F.softmax(seen, dim=-1))
        return self.project((seen @ v).transpose(1, 2).contiguous().view(b, t, c))


class Where(Permuted):
    """A mask of truth values, and numbers made tensors, as in transformers' GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.mix(x).split(WIDTH, dim=2)
        q, k, v = (it.view(*it.shape[:-1], -1, EACH).transpose(1, 2) for it in parts)
        seen = torch.matmul(q, k.transpose(-1, -2))
        seen = seen / torch.full([], v.size(-1) ** 0.5, dtype=seen.dtype, device=seen.device)
        least = torch.full([], torch.finfo(seen.dtype).min, dtype=seen.dtype)
        mask = self.mask[:, :, k.size(-2) - q.size(-2) : k.size(-2), : k.size(-2)]
        seen = F.softmax(torch.where(mask, seen, least), dim=-1).type(v.dtype)
        made = torch.matmul(seen, v).transpose(1, 2)
        return self.project(made.reshape(*made.shape[:-2], -1).contiguous())


class Rotary(nn.Module):
    """Rotated queries, fewer heads of keys, a softmax in float32, as in transformers' Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        angles = torch.outer(torch.arange(LENGTH), 1.0 / 10.0 ** torch.arange(EACH // 2))
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.register_buffer("mask", torch.full((1, 1, LENGTH, LENGTH), -1e9).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        parts = (layer(x) for layer in (self.query, self.key, self.value))
        q, k, v = (it.view(b, t, -1, EACH).transpose(1, 2) for it in parts)
        q, k = self.rotated(q), self.rotated(k)
        k, v = repeated(k), repeated(v)
        seen = torch.matmul(q, k.transpose(2, 3)) * EACH**-0.5
        seen = seen + self.mask[:, :, :t, :t].to(seen.dtype)
        seen = F.softmax(seen, dim=-1, dtype=torch.float32).to(q.dtype)
        made = torch.matmul(seen, v).transpose(1, 2).contiguous()
        return self.project(made.reshape(b, t, -1).contiguous())

    def rotated(self, x: Tensor) -> Tensor:
        cos, sin = (it[None, None, : x.shape[2]].to(x.dtype) for it in (self.cos, self.sin))
        one, other = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-other, one), dim=-1) * sin


def repeated(x: Tensor) -> Tensor:
    b, heads, t, each = x.shape
    return x[:, :, None].expand(b, heads, 2, t, each).reshape(b, 2 * heads, t, each)


class Biased(nn.Module):
    """A trained bias for each distance, added in place, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.project = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.distances = nn.Embedding(8, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        parts = (layer(x) for layer in (self.query, self.key, self.value))
        q, k, v = (it.view(b, -1, HEADS, EACH).transpose(1, 2) for it in parts)
        at = torch.arange(t, device=x.device)
        apart = (at[None, :] - at[:, None]).abs().clamp(max=7)
        seen = torch.matmul(q, k.transpose(3, 2))
        seen += self.distances(apart).permute([2, 0, 1]).unsqueeze(0)
        seen = F.softmax(seen.float(), dim=-1).type_as(seen)
        made = torch.matmul(seen, v).transpose(1, 2).contiguous().view(b, -1, c)
        return self.project(made)


class Flat(Permuted):
    """Heads folded into the first dimension, as in fairseq."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        parts = self.mix(x).chunk(3, -1)
        q, k, v = (
            it.view(b, t, HEADS, EACH).transpose(1, 2).contiguous().view(b * HEADS, t, EACH)
            for it in parts
        )
        made = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
        return self.project(made.view(b, HEADS, t, EACH).transpose(1, 2).reshape(b, t, c))


class OneOp(Permuted):
    """`scaled_dot_product_attention`, which may drop what is seen itself."""

    def __init__(self, p: float = 0.0, *, causal: bool = True) -> None:
        super().__init__()
        self.p = p
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        parts = self.mix(x).chunk(3, dim=-1)
        q, k, v = (it.unflatten(-1, (HEADS, EACH)).transpose(1, 2) for it in parts)
        made = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p, is_causal=self.causal)
        return self.project(made.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """An attention in a transformer's block."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.attention = attention
        self.between = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.between(x))


EXPLICIT = (Permuted, Contiguous, Einsum, Split, Where, Rotary, Biased)
ATTENTIONS = (*EXPLICIT, OneOp)


def sequences(samples: int = 7, *, needs_gradient: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, LENGTH, WIDTH, generator=generator)
    return x.requires_grad_(needs_gradient)
