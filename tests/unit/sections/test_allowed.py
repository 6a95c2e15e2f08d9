from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from belady.ir.plan import Section
from belady.measure.batch import static_trace_with_batch
from belady.measure.static import static_trace
from belady.sections.allowed import reasons
from belady.sections.wrap import wrap
from tests.support.models import Inception
from tests.unit.measure.watching import CPU
from tests.unit.sections.comparing import assert_same_in_sections, children


class Calling(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def found(model: nn.Module, section: Section, x: Tensor) -> tuple[str, ...]:
    return reasons(model, section, static_trace_with_batch(model, ((x,), {}), CPU))


def around(function: Callable[[Tensor], Any]) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), Calling(function), nn.Linear(4, 4))


CONVOLUTIONAL = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1),
    nn.BatchNorm2d(8),
    nn.GELU(),
    nn.Sequential(nn.Conv2d(8, 8, 3, groups=2), nn.GroupNorm(2, 8), nn.LeakyReLU(0.1, True)),
    nn.AvgPool2d(2),
    nn.Upsample(scale_factor=2),
    nn.AdaptiveAvgPool2d(2),
    nn.Flatten(),
    nn.LayerNorm(32),
    nn.Linear(32, 4),
)  # fmt: skip


@pytest.mark.parametrize("numbers", [range(10), range(3), [3], [3, 4, 5]])
def test_what_is_known_to_keep_samples_apart_may_be_cut(numbers: Any) -> None:
    x = torch.randn(6, 3, 8, 8)
    section = children(numbers, 3)
    assert found(CONVOLUTIONAL, section, x) == ()
    assert_same_in_sections(CONVOLUTIONAL, x, section)


def test_forks_and_joins_may_be_cut() -> None:
    x = torch.rand(6, 3, 8, 8) + 1
    model = nn.Sequential(nn.Sigmoid(), Inception())
    for section in (Section(("1",), 2), Section(("1.wide",), 2), Section(("0", "1"), 3)):
        assert found(model, section, x) == ()
        assert_same_in_sections(model, x, section)


MIXED: list[tuple[Callable[[Tensor], Any], str]] = [
    (lambda x: x - x.mean(0, keepdim=True), "comes from all samples"),
    (lambda x: x.softmax(0), "across samples"),
    (lambda x: x.cumsum(0), "not known to act on each sample"),
    (lambda x: x.flip(0), "not known to act on each sample"),
    (lambda x: x.roll(1, 0), "not known to act on each sample"),
    (lambda x: x @ (x.T @ x), "first dimension"),
    (lambda x: torch.cat([x, x]).chunk(2)[0] * 1, "across samples"),
    (lambda x: torch.cat([x, x]).view(len(x), 2, 4).exp()[:, 0], "across samples"),
    (lambda x: x + x.sum(), "comes from all samples"),
    (lambda x: F.normalize(x, dim=0), "comes from all samples"),
    (lambda x: x + torch.rand_like(x), "draws random numbers"),
    (lambda x: F.dropout(x, 0.5), "draws random numbers"),
    (lambda x: F.instance_norm(x[:, None])[:, 0], "not known to act|folded|first dimension"),
    (lambda x: F.batch_norm(x, None, None, training=True), "not in a BatchNorm module"),
]


@pytest.mark.parametrize(("function", "reason"), MIXED)
def test_what_may_mix_samples_is_refused(function: Callable[[Tensor], Any], reason: str) -> None:
    model = around(function)
    x = torch.randn(6, 4)
    (first, *_) = found(model, children(range(2), 2), x)
    assert re.search(reason, first)
    assert found(model, children([2], 2), x) == ()


def test_reasons_name_op_and_module() -> None:
    model = around(lambda x: x.cumsum(0))
    assert found(model, children(range(3), 2), torch.randn(6, 4)) == (
        "op 2 aten.cumsum.default in module '1' (forward) is not known to act on each sample "
        "by itself",
    )


def test_dropout_inside_attention_is_refused() -> None:
    x = torch.randn(6, 5, 16)
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, dropout=0.1, batch_first=True))
    assert any("random" in reason for reason in found(model, Section(("0",), 2), x))


def test_modules_that_cannot_be_called_in_slices_are_refused_first() -> None:
    model = around(torch.tanh)
    model[1].register_forward_hook(lambda *_: None)
    (reason,) = found(model, children(range(2), 2), torch.randn(6, 4))
    assert "has hooks" in reason
    (reason,) = found(around(torch.tanh), children(range(2), 7), torch.randn(6, 4))
    assert "fewer samples" in reason


def test_a_trace_without_batch_dimensions_allows_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    trace = static_trace(model, ((torch.randn(6, 4),), {}), CPU)
    assert "not known" in reasons(model, children(range(2), 2), trace)[0]
    wrap(model, [children(range(2), 2)])()


class _Clips(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * (1e4 / gradient.norm()).clamp(max=1.0)


def _hooked(x: Tensor) -> Tensor:
    made = x * 1.0
    made.register_hook(lambda gradient: gradient * (1e4 / gradient.norm()).clamp(max=1.0))
    return made


@pytest.mark.parametrize("function", [_Clips.apply, _hooked])
def test_a_gradient_that_is_clipped_by_the_norm_of_all_is_seen(
    function: Callable[[Tensor], Any],
) -> None:
    reasons = found(around(function), children(range(3), 2), torch.randn(6, 4))
    assert reasons
    assert "gives each sample back" in reasons[0]


def test_batch_norms_of_stated_statistics_may_be_cut() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval(), nn.ReLU())
    x = torch.randn(6, 3, 8, 8)
    assert found(model, children(range(3), 3), x) == ()
    assert_same_in_sections(model, x, children(range(3), 3))
