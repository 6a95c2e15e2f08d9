"""Sections along the tokens of each sample: one long sequence, or a few."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from belady.errors import SectionError
from belady.ir.plan import Section
from belady.ir.sections import apply
from belady.measure.batch import static_trace_with_batch
from belady.measure.static import static_trace
from belady.sections.allowed import reasons
from belady.sections.candidate import Candidate
from belady.sections.trial import trial
from belady.sections.wrap import wrap
from tests.unit.measure.watching import CPU, saves_of
from tests.unit.sections.comparing import assert_same_in_sections
from tests.unit.sections.test_allowed import Calling
from tests.unit.sections.test_apply import peak
from tests.unit.sections.test_dropout import assert_draws_alike

WIDTH, LENGTH = 8, 13
SAMPLES = pytest.mark.parametrize("samples", [1, 2, 3])


class Gated(nn.Module):
    """SwiGLU: its input is read twice, its result is dropped from."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down, self.dropout = nn.Linear(3 * WIDTH, WIDTH, bias=False), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.silu(self.gate(x)) * self.up(x)))


class Feedforward(nn.Sequential):
    def __init__(self) -> None:
        wide = 4 * WIDTH
        super().__init__(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, wide), nn.GELU(), nn.Dropout(0.2),
            nn.Linear(wide, WIDTH),
        )  # fmt: skip


class Around(nn.Module):
    """Something on the way of tokens, which others read too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.after(x + self.inner(x))


INNER = Section(("inner",), 3, along=1)
HIDDEN = Section(("inner.1", "inner.2"), LENGTH, along=1)


def tokens(samples: int, needs_gradient: bool = False) -> Tensor:
    return torch.randn(samples, LENGTH, WIDTH).requires_grad_(needs_gradient)


def found(model: nn.Module, section: Section, x: Tensor) -> tuple[str, ...]:
    return reasons(model, section, static_trace_with_batch(model, ((x,), {}), CPU, 1))


def normed() -> nn.Module:
    return nn.Sequential(nn.RMSNorm(WIDTH), Gated())


@SAMPLES
@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize(
    ("inner", "section"),
    [
        (Feedforward, INNER),
        (Feedforward, HIDDEN),
        (Feedforward, Section(("inner.0", "inner.1", "inner.2", "inner.3"), 2, along=1)),
        (Gated, INNER),
        (normed, INNER),
        (normed, Section(("inner.1",), 4, along=1)),
    ],
)
def test_what_treats_tokens_by_themselves_runs_along_them(
    inner: Callable[[], nn.Module], section: Section, needs_gradient: bool, samples: int
) -> None:
    model, x = Around(inner()), tokens(samples, needs_gradient)
    assert found(model, section, x) == ()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert_draws_alike(model, x, section, dtype)
    candidate = Candidate.of(model, ((x,), {}), CPU)
    assert candidate is not None
    assert candidate.dims(1) is not None
    assert candidate.may_cut(section), candidate.refused


@SAMPLES
@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("section", [INNER, HIDDEN], ids=str)
def test_the_trace_is_that_of_the_execution(
    section: Section, needs_gradient: bool, samples: int
) -> None:
    model, call = Around(Feedforward()), ((tokens(samples, needs_gradient),), {})
    predicted = apply(static_trace_with_batch(model, call, CPU, 1), [section])
    undo = wrap(model, [section])
    real = static_trace(model, call, CPU)
    assert [op.name for op in predicted.ops] == [op.name for op in real.ops]
    assert [save for _, save in saves_of(predicted)] == [save for _, save in saves_of(real)]
    assert Counter(predicted.storages) == Counter(real.storages)
    assert peak(predicted) == peak(real)
    undo()
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_layer_that_meets_data_first_is_cut_too() -> None:
    for samples in (1, 3):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
        section, x = Section(("0", "1"), 3, along=1), tokens(samples)
        assert found(model, section, x) == ()
        assert_same_in_sections(model, x, section)


def test_slices_are_dense_and_so_is_what_comes_out() -> None:
    seen: list[tuple[bool, torch.Size]] = []

    def watched(x: Tensor) -> Tensor:
        seen.append((x.is_contiguous(), x.shape))
        made = x.view(-1, WIDTH).tanh().view(x.shape)
        if made.requires_grad:
            made.register_hook(lambda it: seen.append((it.is_contiguous(), it.shape)))
        return made

    model, x = Around(Calling(watched)), tokens(2, needs_gradient=True)
    wrap(model, [INNER])
    model(x).sum().backward()
    assert len(seen) == 6
    assert all(dense for dense, _ in seen)
    assert [shape[1] for _, shape in seen[:3]] == [5, 4, 4]


KEPT: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.softmax(-1),
    lambda x: x - x.mean(-1, keepdim=True),
    lambda x: F.layer_norm(x, (WIDTH,)),
    lambda x: x.view(*x.shape[:2], 2, -1).transpose(1, 2).softmax(-1).transpose(1, 2).flatten(2),
    lambda x: x.reshape(-1, 2).exp().reshape(x.shape),
    lambda x: torch.cat([x[..., 1:], x[..., :1]], -1),
    lambda x: x.unsqueeze(2).expand(-1, -1, 2, -1).amax(2),
]


@SAMPLES
@pytest.mark.parametrize("function", KEPT)
def test_what_is_known_to_keep_tokens_apart_may_be_cut(
    function: Callable[[Tensor], Tensor], samples: int
) -> None:
    # What is saved shows how many there are.
    model, x = Around(Calling(lambda x: function(x).tanh())), tokens(samples)
    assert found(model, INNER, x) == ()
    assert_same_in_sections(model, x, INNER)


def attended(x: Tensor) -> Tensor:
    heads = x.view(*x.shape[:2], 2, -1).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2)


def looked(x: Tensor) -> Tensor:
    return (x @ x.transpose(1, 2)).softmax(-1) @ x


def shifted(x: Tensor) -> Tensor:
    return torch.cat([x[:, 1:], x[:, :1]], 1)


def placed(x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[1], dtype=x.dtype)[None, :, None]


def merged(x: Tensor) -> Tensor:
    """Two orders of rows meet: tokens of each head, and heads of each token."""
    rows = x.reshape(-1, WIDTH // 2)
    return (rows + rows.view(-1, 2, WIDTH // 2).transpose(0, 1).reshape(rows.shape)).view(x.shape)


MIXED: list[tuple[Callable[[Tensor], Any], str]] = [
    (lambda x: attended(x).flatten(2), "known to act on each token"),
    (looked, "known to act on each token"),
    (lambda x: x.softmax(1), "across tokens"),
    (lambda x: x.cumsum(1), "not known to act on each token by itself"),
    (lambda x: x.flip(1), "not known to act on each token by itself"),
    (lambda x: x.roll(1, 1), "not known to act on each token by itself"),
    (shifted, "across tokens"),
    (placed, "not known to act on each token|comes from how many there are"),
    (merged, "across tokens"),
    (lambda x: x - x.mean(1, keepdim=True), "comes from all tokens"),
    (lambda x: x / x.shape[1], "comes from how many there are"),
    (lambda x: F.layer_norm(x, x.shape[1:]), "across tokens"),
    (lambda x: F.instance_norm(x.transpose(1, 2)).transpose(1, 2), "known to act|second"),
    (lambda x: F.conv1d(x.mT, torch.ones(WIDTH, 1, 3), None, 1, 1, 1, WIDTH).mT, "known to act"),
    (lambda x: F.avg_pool1d(x.mT, 3, 1, 1).mT, "known to act|across tokens"),
    (lambda x: x[:, :1] + x, "comes from all tokens|across tokens"),
    (lambda x: x.view(x.shape[0], -1, x.shape[1]).exp().view(x.shape), "across tokens"),
    (lambda x: x + torch.rand_like(x), "draws random numbers"),
    (lambda x: F.dropout(x, 0.5), "draws random numbers"),
    (
        lambda x: F.batch_norm(x.flatten(0, 1), None, None, training=True).view(x.shape),
        "all tokens|each row",
    ),
]


@SAMPLES
@pytest.mark.parametrize(("function", "reason"), MIXED)
def test_what_may_mix_tokens_is_refused(
    function: Callable[[Tensor], Any], reason: str, samples: int
) -> None:
    model = Around(Calling(function))
    (first, *_) = found(model, INNER, tokens(samples))
    assert re.search(reason, first)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, 1)).view(x.shape)


@SAMPLES
def test_a_batch_norm_over_tokens_is_refused(samples: int) -> None:
    model, x = Around(Normed()), tokens(samples)
    assert any("takes statistics of all tokens" in it for it in found(model, INNER, x))
    with pytest.raises(SectionError, match="takes statistics of all tokens"):
        wrap(model, [INNER])
    undo = wrap(model.eval(), [INNER])
    model.train()
    with pytest.raises(SectionError, match="takes statistics of all tokens"):
        model(x)
    undo()


class Turned(nn.Module):
    """Drops where tokens are in another dimension, which slices would give numbers out along."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.dropout = dim, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        if not self.dim:
            return self.dropout(x.flatten(0, 1)).view(x.shape).tanh()
        return self.dropout(x.transpose(1, self.dim)).transpose(1, self.dim).tanh()


@SAMPLES
@pytest.mark.parametrize("dim", [0, 2])
def test_a_dropout_that_has_tokens_elsewhere_is_refused(dim: int, samples: int) -> None:
    model, x = Around(Turned(dim)), tokens(samples, needs_gradient=True)
    (first, *_) = found(model, INNER, x)
    assert "does not have the tokens in the second dimension" in first
    wrap(model, [INNER])
    with pytest.raises(SectionError, match="a Dropout is given samples that do not lie dense"):
        model(x)


def test_what_a_trace_does_not_show_is_tried() -> None:
    def peeks(x: Tensor) -> Tensor:
        return x * (1.0 if x.shape[1] > 4 else 2.0)

    model = Around(Calling(peeks))
    with pytest.raises(SectionError, match="tried on 5 tokens"):
        trial(model, INNER, tokens(1, needs_gradient=True))
    candidate = Candidate.of(model, ((tokens(1),), {}), CPU)
    assert candidate is not None
    assert candidate.dims(1) is not None
    assert not candidate.may_cut(INNER)


def test_tokens_that_do_not_lie_one_after_another_are_refused() -> None:
    model = Around(nn.Tanh())
    wrap(model.inner, [Section(("",), 2, along=1)])
    assert model.inner(tokens(2, True)).shape == (2, LENGTH, WIDTH)
    with pytest.raises(SectionError, match="do not lie one after another"):
        model.inner(tokens(2, True).mT.contiguous().mT)
    with pytest.raises(SectionError, match="0 tensors with a token dimension"):
        model.inner(torch.ones(3, requires_grad=True))


def test_a_result_with_other_tokens_is_refused() -> None:
    for function in (lambda x: x[:, :1], lambda x: x.mean((1, 2))):
        model = Calling(function)
        wrap(model, [Section(("",), 2, along=1)])
        with pytest.raises(SectionError, match="second dimension is not theirs"):
            model(tokens(1, True))


@pytest.mark.parametrize("along", [-1, 2])
def test_other_dimensions_are_refused(along: int) -> None:
    with pytest.raises(SectionError, match="dimension 0 or 1"):
        wrap(nn.Sequential(nn.Tanh()), [Section(("0",), 2, along=along)])


class Masked(nn.Module):
    """What a module shares among slices may have one row where tokens are cut, and no more."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, Scaled()
        self.before = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        other = {
            "channels": torch.ones(WIDTH),
            "row": torch.ones(1, 1, WIDTH),
            "tokens": torch.ones(1, t, 1),
            "positions": torch.arange(t, dtype=x.dtype)[:, None],
        }[self.how]
        return self.before(x) + self.inner(self.before(x), other)


class Scaled(nn.Module):
    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        return (x * by).tanh()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("channels", ""),
        ("row", ""),
        ("tokens", "2 tensors with a token dimension"),
        ("positions", "not known to act on each token by itself where it has them"),
    ],
)
def test_other_arguments_have_no_tokens(how: str, reason: str) -> None:
    model, x = Masked(how), tokens(1, True)
    candidate = Candidate.of(model, ((x,), {}), CPU)
    assert candidate is not None
    assert candidate.dims(1) is not None
    assert candidate.may_cut(INNER) == (not reason)
    assert reason in candidate.refused.get("inner", "")
    if not reason:
        assert_same_in_sections(model, x, INNER)


def test_where_tokens_cannot_be_found_a_single_sample_says_so() -> None:
    fixed = nn.Sequential(Calling(lambda x: x + torch.ones(LENGTH, 1)), nn.Tanh())
    for samples, said in ((1, "where its tokens are is not known"), (2, "")):
        candidate = Candidate.of(fixed, ((tokens(samples, True),), {}), CPU)
        assert candidate is not None
        assert candidate.dims(1) is None
        assert said in candidate.refused.get("", "")
        assert not candidate.may_cut(Section(("1",), 2, along=1))


def test_a_mask_of_all_tokens_does_not_hide_them() -> None:
    class WithMask(Around):
        def forward(self, x: Tensor, mask: Tensor, causal: Tensor) -> Tensor:
            x = self.before(x)
            seen = (x @ x.mT).masked_fill(~(mask[:, 0] & causal), -1e9)
            return self.after(self.inner(seen.softmax(-1) @ x))

    mask = torch.ones(2, 1, 1, LENGTH, dtype=torch.bool)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    call = ((tokens(2, True), mask, causal), {})
    candidate = Candidate.of(WithMask(Feedforward()), call, CPU)
    assert candidate is not None
    assert candidate.dims(1) is not None
    assert candidate.may_cut(INNER), candidate.refused
