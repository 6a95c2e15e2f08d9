"""Random stacks, cut at random: the numbers of the whole batch, and what the trace foretells."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from belady.ir.plan import Section
from belady.measure.batch import static_trace_with_batch
from belady.sections.allowed import reasons
from tests.support.training import repeatable
from tests.unit.measure.watching import CPU, saves_of
from tests.unit.sections.comparing import assert_same_in_sections
from tests.unit.sections.test_apply import peak, traces

# A channel may come out constant; one over its deviation magnifies rounding so much at most.
EPS = 0.1
Layer = Callable[[int, int], nn.Module]


def normed(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, eps=EPS)


CONVOLUTIONS: tuple[Layer, ...] = (
    lambda n, m: nn.Conv2d(n, m, 3, padding=1),
    lambda n, m: nn.Sequential(
        nn.Conv2d(n, m, 3, padding=1, bias=False), nn.BatchNorm2d(m, eps=EPS)
    ),
    lambda n, m: nn.Sequential(nn.Conv2d(n, m, 1), nn.GroupNorm(1, m), nn.SiLU()),
)
BETWEEN: tuple[Layer, ...] = (
    lambda _n, m: nn.ReLU(),
    lambda _n, m: nn.Sigmoid(),
    lambda _n, m: nn.AvgPool2d(3, 1, 1),
    lambda _n, m: nn.MaxPool2d(3, 1, 1),
    lambda _n, m: nn.BatchNorm2d(m, eps=EPS, affine=False, momentum=0.3),
    lambda _n, m: nn.Identity(),
)
DENSE: tuple[Layer, ...] = (
    nn.Linear,
    lambda n, m: nn.Sequential(nn.Linear(n, m), nn.BatchNorm1d(m, eps=EPS), nn.Tanh()),
    lambda n, m: nn.Sequential(nn.LayerNorm(n), nn.Linear(n, m), nn.ReLU(inplace=True)),
)


@st.composite
def stacks(draw: st.DrawFn) -> tuple[nn.Sequential, Tensor, Section]:
    torch.manual_seed(draw(st.integers(0, 999)))
    samples = draw(st.integers(2, 7))
    # Of two numbers, a norm leaves the signs alone, and a batch of equal ones has no variance.
    widths = st.integers(3, 5)
    width = draw(widths)
    layers: list[nn.Module] = []
    dense = draw(st.booleans())
    x = torch.randn(samples, width) if dense else torch.randn(samples, width, 5, 6)
    for _ in range(draw(st.integers(2, 4))):
        wider = draw(widths)
        layers.append(draw(st.sampled_from(DENSE if dense else CONVOLUTIONS))(width, wider))
        width = wider
        if not dense:
            layers.append(draw(st.sampled_from(BETWEEN))(width, width))
    if not dense and draw(st.booleans()):
        x = x.to(memory_format=torch.channels_last)
    first = draw(st.integers(0, len(layers) - 1))
    last = draw(st.integers(first, len(layers) - 1))
    section = Section(
        tuple(str(number) for number in range(first, last + 1)), draw(st.integers(2, samples))
    )
    return nn.Sequential(*layers), x.requires_grad_(draw(st.booleans())), section


@given(stacks(), st.sampled_from([torch.float64, torch.float32]))
def test_random_stacks_give_the_numbers_of_the_whole_batch(
    case: tuple[nn.Sequential, Tensor, Section], dtype: torch.dtype
) -> None:
    model, x, section = case
    with repeatable():
        assert_same_in_sections(model, x, section, dtype=dtype)


# An example is an iteration traced, and two observed.
@settings(max_examples=settings.default.max_examples // 3)
@given(stacks())
def test_the_trace_foretells_saves_and_peak(case: tuple[nn.Sequential, Tensor, Section]) -> None:
    model, x, section = case
    trace = static_trace_with_batch(model, ((x,), {}), CPU)
    if reasons(model, section, trace):
        return
    with repeatable():
        _, predicted, real = traces(model, x, section)
    assert [save.shape for _, save in saves_of(predicted)] == [
        save.shape for _, save in saves_of(real)
    ]
    # A batch norm's vectors of one number a channel are not foretold.
    vectors = 40 * 4 * 5 if "BatchNorm" in str(model) else 0
    assert abs(peak(predicted) - peak(real)) <= vectors
