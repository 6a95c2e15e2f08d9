"""Several rows a sample: linear layers fold tokens into the first dimension."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from belady.ir.plan import Section
from belady.ir.sections import apply
from belady.measure.batch import static_trace_with_batch
from belady.measure.static import static_trace
from belady.sections.trial import trial
from belady.sections.wrap import wrap
from tests.support.models import Block
from tests.unit.measure.watching import CPU, saves_of
from tests.unit.sections.comparing import children
from tests.unit.sections.test_allowed import around, found
from tests.unit.sections.test_dropout import assert_draws_alike

MLP = Section(("mlp.0", "mlp.1", "mlp.2", "mlp.3"), 3)


def tokens(needs_gradient: bool = False) -> Tensor:
    return torch.randn(7, 5, 16).requires_grad_(needs_gradient)


def test_the_mlp_of_a_transformer_may_be_cut() -> None:
    block, x = Block(16, 2), tokens()
    for section in (MLP, Section(("mlp",), 2), Section(MLP.modules[:3], 7)):
        assert found(block, section, x) == ()
        assert_draws_alike(block, x, section)
    trial(block.mlp, children(range(4), 3), x)


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("section", [MLP, Section(MLP.modules[:2], 7)], ids=str)
def test_the_trace_is_that_of_the_execution(section: Section, needs_gradient: bool) -> None:
    block, call = Block(16, 2), ((tokens(needs_gradient),), {})
    predicted = apply(static_trace_with_batch(block, call, CPU), [section])
    wrap(block, [section])
    real = static_trace(block, call, CPU)
    assert [op.name for op in predicted.ops] == [op.name for op in real.ops]
    assert [save for _, save in saves_of(predicted)] == [save for _, save in saves_of(real)]
    assert Counter(predicted.storages) == Counter(real.storages)


def test_a_batch_that_nothing_saved_shows_is_refused() -> None:
    (reason,) = found(Block(16, 2), Section(("mlp.0",), 2), tokens())
    assert "its batch cannot be told from what it saves: []" in reason


def between(function: Callable[[Tensor], Tensor]) -> nn.Sequential:
    return nn.Sequential(nn.Tanh(), *around(function), nn.Tanh())


def rows(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x.reshape(-1, 4)).reshape(x.shape)


KEPT: list[Callable[[Tensor], Tensor]] = [
    rows(torch.exp),
    rows(lambda x: x.view(-1, 2).tanh()),
    rows(lambda x: nn.functional.layer_norm(x, (4,))),
]
MIXED: list[tuple[Callable[[Tensor], Tensor], str]] = [
    (rows(lambda x: torch.cat(x.chunk(2)[::-1])), "across samples"),
    (rows(lambda x: x - x.mean(0)), "each row by itself"),
    (rows(lambda x: x.flip(0)), "not known to act"),
    (rows(lambda x: x.T.reshape(-1, 4)), "across samples"),
    (rows(lambda x: x.view(6, -1, 4).mul(2)), "across samples"),
    (
        lambda x: x.transpose(0, 1).reshape(-1, 4).exp().view(6, -1, 4).transpose(0, 1),
        "across samples",
    ),
]


@pytest.mark.parametrize("function", KEPT)
def test_what_treats_each_row_by_itself_may_be_cut(function: Callable[[Tensor], Tensor]) -> None:
    model, x = between(function), torch.randn(4, 6, 4)
    assert found(model, children(range(5), 2), x) == ()
    assert_draws_alike(model, x, children(range(5), 2))


@pytest.mark.parametrize(("function", "reason"), MIXED)
def test_what_may_mix_rows_is_refused(function: Callable[[Tensor], Tensor], reason: str) -> None:
    (first, *_) = found(between(function), children(range(5), 2), torch.randn(4, 6, 4))
    assert re.search(reason, first)
