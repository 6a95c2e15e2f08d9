"""Attention in slices: where the samples are is followed through every view."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from belady.ir.plan import Section
from belady.ir.samples import mixing
from belady.ir.sections import apply
from belady.ir.trace import Trace, Use, Value
from belady.measure.batch import static_trace_with_batch
from belady.measure.static import static_trace
from belady.sections.trial import trial
from belady.sections.wrap import wrap
from tests.unit.measure.watching import CPU, op_named
from tests.unit.sections.attentions import (
    ATTENTIONS,
    Flat,
    Layer,
    OneOp,
    Permuted,
    Split,
    sequences,
)
from tests.unit.sections.comparing import assert_same_in_sections, children
from tests.unit.sections.test_allowed import Calling, found
from tests.unit.sections.test_apply import peak, shapes
from tests.unit.sections.test_dropout import assert_draws_alike

WHOLE = Section(("",), 2)
ATTENTION = Section(("attention",), 3)


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("section", [ATTENTION, WHOLE], ids=["attention", "layer"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_attention_may_be_cut_and_gives_the_numbers_of_the_whole_batch(
    attention: type[nn.Module], section: Section, needs_gradient: bool
) -> None:
    model, x = Layer(attention()), sequences(needs_gradient=needs_gradient)
    assert found(model, section, x) == ()
    assert_same_in_sections(model, x, section)
    trial(model, section, x)


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("section", [ATTENTION, WHOLE], ids=["attention", "layer"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_trace_foretells_saves_storages_and_peak(
    attention: type[nn.Module], section: Section, needs_gradient: bool
) -> None:
    model, call = Layer(attention()), ((sequences(needs_gradient=needs_gradient),), {})
    predicted = apply(static_trace_with_batch(model, call, CPU), [section])
    wrap(model, [section])
    real = static_trace(model, call, CPU)
    assert shapes(predicted) == shapes(real)
    assert sizes(predicted) == sizes(real)
    assert peak(predicted) == peak(real)
    # Autograd adds gradients of what several layers read in an order of its own.
    assert Counter(op.name for op in predicted.ops) == Counter(op.name for op in real.ops)


def sizes(trace: Trace) -> Counter[Any]:
    return Counter((it.nbytes, it.kind) for it in trace.storages)


def test_dropout_of_what_is_seen_draws_for_all() -> None:
    for attention in (Permuted(0.3), Split(0.3)):
        model, x = Layer(attention), sequences()
        assert found(model, ATTENTION, x) == ()
        assert_draws_alike(model, x, ATTENTION)


def test_attention_of_the_math_kernel_may_be_cut() -> None:
    model, x = Layer(OneOp(causal=False)), sequences()
    with sdpa_kernel(SDPBackend.MATH):
        assert found(model, ATTENTION, x) == ()
        assert_same_in_sections(model, x, ATTENTION)


FUSED = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("random", [False, True])
def test_fused_attention_may_be_cut_where_it_drops_nothing(name: str, random: bool) -> None:
    model = Layer(OneOp())
    trace = static_trace_with_batch(model, ((sequences(),), {}), CPU)
    at, op = op_named(trace, "_scaled_dot_product_flash_attention_for_cpu.default")
    op = replace(op, name=f"aten.{name}.default", random=random)
    trace = replace(trace, ops=(*trace.ops[:at], op, *trace.ops[at + 1 :]))
    reasons = mixing(trace, ATTENTION)
    assert bool(reasons) == random
    assert not random or "draws random numbers" in reasons[0]


def test_seeds_that_a_kernel_gives_are_no_samples() -> None:
    trace = static_trace_with_batch(Layer(OneOp()), ((sequences(),), {}), CPU)
    at, op = op_named(trace, "_scaled_dot_product_flash_attention_for_cpu.default")
    back, gradient = next((i, it) for i, it in enumerate(trace.ops) if it.forward_op == at)
    seed, made = len(trace.values), trace.values[op.writes[1]]
    (save,) = made.saves
    saves = (replace(save, shape=(2,), stride=(1,), offset=0, ordinal=99),)
    ops = list(trace.ops)
    ops[at] = replace(op, writes=(*op.writes, seed))
    reads, dims = (*gradient.reads, seed), (*(0 for _ in gradient.reads), None)
    ops[back] = replace(gradient, reads=reads, batch_dims=dims)
    storages = (*trace.storages, replace(trace.storages[made.storage], nbytes=16))
    value = Value(len(storages) - 1, 0, at, (Use(back),), saves)
    trace = replace(trace, ops=tuple(ops), storages=storages, values=(*trace.values, value))
    assert mixing(trace, ATTENTION) == ()
    cut = apply(trace, [ATTENTION])
    assert [it.nbytes for it in cut.storages].count(16) == 3


def test_dropout_in_the_op_is_refused() -> None:
    (first, *_) = found(Layer(OneOp(0.1)), ATTENTION, sequences())
    assert "draws random numbers" in first


def around(function: Callable[[Tensor], Any]) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Calling(function), nn.Linear(8, 8), nn.GELU())


def refused(function: Callable[[Tensor], Any]) -> str:
    reasons = found(around(function), children(range(4), 2), torch.randn(6, 4, 8))
    return reasons[0] if reasons else ""


def test_a_softmax_over_the_batch_is_refused_where_no_number_could_show_it() -> None:
    model = around(lambda x: x * (1 + 1e-30 * x.sum((1, 2), keepdim=True).softmax(0)))
    x = torch.randn(6, 4, 8)
    for tensor in model[2].parameters():
        nn.init.zeros_(tensor)
    section = children(range(4), 2)
    trial(model, section, x)
    (reason, *_) = found(model, section, x)
    assert re.match(r"op \d+ aten._softmax.default in module '1' .* acts across samples", reason)


def _written(x: Tensor, view: Callable[[Tensor], Tensor]) -> Tensor:
    made = torch.zeros(x.numel(), dtype=x.dtype)
    view(made).copy_(x)
    return made.view(x.shape) * 1


ACROSS: dict[str, Callable[[Tensor], Any]] = {
    "softmax moved": lambda x: x.transpose(0, 1).softmax(1).transpose(0, 1),
    "softmax counted from the end": lambda x: x.transpose(0, 2).softmax(-1).transpose(0, 2),
    "softmax of rows": lambda x: x.reshape(-1, 8).log_softmax(0).view(x.shape),
    "joined along the batch": lambda x: torch.cat([x, x])[::2] * 1,
    "order of a view": lambda x: x.view(4, -1, 8).transpose(0, 1) * 1,
    "order of a copy": lambda x: x.permute(1, 0, 2).reshape(x.shape).exp(),
    "order of what comes out": lambda x: x.exp().view(4, -1, 8).transpose(0, 1),
    "order of a stack": lambda x: torch.stack([x, x * 2]).reshape(-1, 2, 4, 8)[:, 0] * 1,
    "order of what is written": lambda x: _written(x, lambda y: y.view(4, -1, 8).transpose(0, 1)),
    "the first for all": lambda x: x + x.as_strided(x.shape, (0, 8, 1)),
    "sequences first": lambda x: F.linear(x.transpose(0, 1), torch.ones(8, 8)).transpose(0, 1),
    "attention of samples": lambda x: F.scaled_dot_product_attention(
        *[x.transpose(0, 1)[None]] * 3
    )[0].transpose(0, 1),
    "each to each": lambda x: torch.softmax(x.flatten(1) @ x.flatten(1).T, -1) @ x[:, 0],
    "norm over all": lambda x: F.layer_norm(x, x.shape),
    "a number of the batch": lambda x: x / len(x),
    "a tensor of that number": lambda x: x * torch.full((len(x), 1, 1), 1.0 / len(x)),
    "a list of that number": lambda x: x * torch.tensor([1.0 / len(x)] * 8),
    "a count of the batch": lambda x: x * torch.ones(len(x)).sum(),
    "places in the batch": lambda x: x + torch.arange(len(x))[:, None, None],
    "a table of samples": lambda x: F.embedding(x[:, 0, 0].long(), x.flatten(1)).view(x.shape),
    "mean": lambda x: x - x.mean(0, keepdim=True).expand_as(x),
    "first": lambda x: x + x[:1].expand_as(x),
}  # fmt: skip


@pytest.mark.parametrize("name", ACROSS)
def test_what_acts_across_samples_is_refused(name: str) -> None:
    assert re.search("across samples|first dimension|all samples|not known", refused(ACROSS[name]))


APART: dict[str, Callable[[Tensor], Any]] = {
    "softmax moved": lambda x: x.transpose(0, 1).softmax(0).transpose(0, 1),
    "softmax of rows": lambda x: x.reshape(-1, 8).softmax(1).view(x.shape),
    "moved and back": lambda x: F.gelu(x.transpose(0, 1)).transpose(0, 1),
    "viewed and back": lambda x: x.view(4, -1, 8).view(x.shape).exp(),
    "stacked": lambda x: torch.stack([x, x * 2])[1] * 1,
    "written": lambda x: _written(x, lambda y: y.view(-1, 4, 8)),
    "bits": lambda x: x.detach().view(torch.int32).view(x.dtype) * x,
    "a trained token": lambda x: torch.cat([torch.ones(1, 1, 8).expand(len(x), -1, -1), x], 1),
    "a list of numbers": lambda x: x * torch.tensor([1.0, 2.0] * 4),
    "a number of the tokens": lambda x: x / x.shape[1] + torch.arange(4)[:, None],
}


@pytest.mark.parametrize("name", APART)
def test_what_keeps_samples_apart_may_be_cut(name: str) -> None:
    assert refused(APART[name]) == ""
    model, x = around(APART[name]), torch.randn(6, 4, 8)
    assert_same_in_sections(model, x, children(range(4), 2), dtype=torch.float32)


class Turned(nn.Module):
    """Gives a module sequences first, and batches afterwards."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(16, 16)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.before(x).transpose(0, 1)).transpose(0, 1)


def test_what_a_module_is_given_is_cut_along_its_first_dimension_alone() -> None:
    model = Turned(nn.Sequential(nn.GELU(), nn.Linear(16, 16)))
    for section in (Section(("inner.0",), 2), Section(("inner",), 2)):
        (reason, *_) = found(model, section, torch.randn(6, 6, 16))
        assert "is the first to read what goes in" in reason


def test_heads_folded_into_the_batch_may_be_cut_in_a_layer() -> None:
    model, x = Layer(Flat()), sequences()
    assert "cannot be told" in found(model, ATTENTION, x)[0]
    assert found(model, WHOLE, x) == ()
    assert_same_in_sections(model, x, WHOLE)
