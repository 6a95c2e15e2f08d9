"""Masks that are known when a graph is captured leave attention, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import belady
from belady.graph.masks import drop_known

LENGTH = 12
Mask = Callable[[Tensor, Tensor], Tensor]


def broadcast(x: Tensor, _: Tensor) -> Tensor:
    """As Hugging Face's models make it, for positions that may be of several sequences."""
    queries, keys = torch.arange(LENGTH) + 0, torch.arange(LENGTH)
    batch, positions = torch.arange(x.shape[0]), torch.arange(LENGTH).expand(x.shape[0], -1)
    packed = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    queries, keys = queries[None, None, :, None], keys[None, None, None, :]
    batch = batch[:, None, None, None]
    mask = queries.new_ones((), dtype=torch.bool) & (keys <= queries)
    mask = mask & (packed[batch, queries] == packed[batch, keys])
    return mask.expand(x.shape[0], -1, LENGTH, LENGTH)


def triangle(x: Tensor, _: Tensor) -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def nothing(x: Tensor, _: Tensor) -> Tensor:
    return torch.ones(x.shape[0], 1, LENGTH, LENGTH, dtype=torch.bool)


def window(x: Tensor, _: Tensor) -> Tensor:
    return triangle(x, _) & torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(-3)


def given(x: Tensor, padding: Tensor) -> Tensor:
    return triangle(x, padding) & padding


def written_to(x: Tensor, _: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[3, 1] = False
    return mask


def written_through_a_view(x: Tensor, _: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    mask.view(-1).logical_not_()
    return mask


def drawn(x: Tensor, _: Tensor) -> Tensor:
    return (torch.rand(LENGTH, LENGTH) < 2) & triangle(x, _)


def in_numbers(x: Tensor, _: Tensor) -> Tensor:
    return torch.zeros(LENGTH, LENGTH).masked_fill(~triangle(x, _), float("-inf"))


def shorter(x: Tensor, _: Tensor) -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-1) | torch.eye(LENGTH).bool()


def drops(function: Callable[..., Tensor], *args: Tensor) -> tuple[int, Tensor]:
    """How many masks were taken off, and what the function gives then."""
    counts = []

    def backend(module: fx.GraphModule, _: object) -> Callable[..., object]:
        counts.append(drop_known(module))
        module.graph.lint()
        assert ("tril" in str(module.graph)) <= (counts == [0])
        return module

    torch._dynamo.reset()
    found = torch.compile(function, backend=backend, fullgraph=True)(*args)
    return counts[0], found


def dropped(mask: Mask, *, by_position: bool) -> tuple[int, Tensor, Tensor]:
    """How many masks were taken off two attentions; what they give then, and with them."""

    def attend(x: Tensor, padding: Tensor) -> Tensor:
        known = mask(x, padding)
        if by_position:
            first = F.scaled_dot_product_attention(x, x, x, known, 0.0, False)
        else:
            first = F.scaled_dot_product_attention(x, x, x, attn_mask=known)
        return F.scaled_dot_product_attention(first, x, x, attn_mask=known, scale=0.3)

    torch.manual_seed(0)
    x, padding = torch.randn(2, 3, LENGTH, 8), torch.ones(LENGTH, dtype=torch.bool)
    return *drops(attend, x, padding), attend(x, padding)


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("mask", [broadcast, triangle, nothing])
def test_known(mask: Mask, by_position: bool) -> None:
    count, found, wanted = dropped(mask, by_position=by_position)
    assert count == 2
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize(
    "mask", [window, given, written_to, written_through_a_view, drawn, in_numbers, shorter]
)
def test_not_known(mask: Mask, by_position: bool) -> None:
    torch.manual_seed(0)
    count, found, wanted = dropped(mask, by_position=by_position)
    assert count == 0
    torch.testing.assert_close(found, wanted, equal_nan=True)


@pytest.mark.parametrize("written", [False, True])
def test_positions_that_others_read(written: bool) -> None:
    table = torch.randn(LENGTH, 8)

    def attend(x: Tensor) -> Tensor:
        positions = torch.arange(LENGTH)
        mask = positions[None, :] <= positions[:, None]
        x = x + F.embedding(positions, table)
        if written:
            positions.unsqueeze(0).add_(1)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    x = torch.randn(2, 3, LENGTH, 8)
    count, found = drops(attend, x)
    assert count == (not written)
    torch.testing.assert_close(found, attend(x))


def test_what_else_is_written_to_stays() -> None:
    """A call whose result nobody uses may be there for what it writes."""
    calls = torch.zeros(3)

    def attend(x: Tensor) -> Tensor:
        calls.add_(1)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    x = torch.randn(2, 3, LENGTH, 8)
    assert drops(attend, x)[0] == 1
    assert calls.tolist() == [1, 1, 1]


def test_a_cross_attention_keeps_its_mask() -> None:
    """Where there are more keys than queries, torch's ``is_causal`` begins at another end."""

    def attend(x: Tensor, memory: Tensor) -> Tensor:
        mask = torch.ones(LENGTH, LENGTH + 2, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(x, memory, memory, attn_mask=mask)

    x, memory = torch.randn(2, 3, LENGTH, 8), torch.randn(2, 3, LENGTH + 2, 8)
    count, found = drops(attend, x, memory)
    assert count == 0
    torch.testing.assert_close(found, attend(x, memory))


class Attention(nn.Module):
    """Makes a mask where it finds itself compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.project = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        compiled = torch.compiler.is_compiling()
        mask = broadcast(x, x) if compiled else None
        query, key, value = self.mix(x).unflatten(-1, (6, 8)).transpose(1, 2).chunk(3, 1)
        seen = F.scaled_dot_product_attention(query, key, value, mask, 0.0, not compiled)
        return x + self.project(seen.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("engine", "masks"), [("graph", True), ("inductor", False)])
def test_where_bits_may_differ_alone(engine: str, masks: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention() for _ in range(2)))
    x = torch.randn(2, LENGTH, 16, requires_grad=True)
    wanted = torch.autograd.grad(model(x).square().mean(), x)
    with belady.virtualize(model, "1MiB", engine=engine) as vm:
        for _ in range(7):
            found = torch.autograd.grad(model(x).square().mean(), x)
        run = vm.run()
    torch.testing.assert_close(found, wanted)
    assert run is not None
    assert any("aten.le" in op.name for op in run.trace.ops) == masks
