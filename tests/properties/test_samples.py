"""Random programs of views and small ops: what may be cut gives slices their own numbers.

Slices are of samples, or of the tokens of each sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from belady.errors import TraceError
from belady.ir.plan import Section
from belady.ir.samples import mixing
from belady.measure.batch import static_trace_with_batch
from tests.unit.measure.watching import CPU

# Equal sizes, so that much looks like a batch.
SAMPLES, TOKENS, WIDTH = 4, 4, 4
Step = Callable[[Tensor, Tensor], Tensor]


def _reshaped(shape: tuple[int, ...]) -> Step:
    return lambda x, _: x.reshape(shape)


def _product(x: Tensor, y: Tensor) -> Tensor:
    return x @ x.transpose(-2, -1) if x.dim() > 1 else x * y.sum() * 0 + x


def _folded(x: Tensor, _: Tensor) -> Tensor:
    """As a linear layer does it."""
    return (x.reshape(-1, x.shape[-1]) @ torch.ones(x.shape[-1], x.shape[-1])).view(x.shape)


def _folded_twice(x: Tensor, _: Tensor) -> Tensor:
    """Rows of one order meet rows of another, unless one of the two dimensions has one."""
    if x.dim() < 3:
        return x
    return (x.flatten(0, 1) + x.transpose(0, 1).reshape(-1, *x.shape[2:])).view(x.shape)


def _written(x: Tensor, _: Tensor) -> Tensor:
    made = torch.zeros(x.shape)
    made.copy_(x)
    return made


FIXED: tuple[Step, ...] = (
    lambda x, _: x.exp(),
    lambda x, _: x.contiguous(),
    lambda x, y: x + y if x.shape == y.shape else x * 2,
    lambda x, _: torch.stack([x, -x]),
    lambda x, _: x.unsqueeze(1).expand(-1, 2, *x.shape[1:]),
    _product,
    _folded,
    _folded_twice,
    _written,
)


SHAPES = (
    (-1, 4, 4), (4, -1, 4), (4, 4, -1), (-1, 16), (16, -1), (-1, 4), (4, -1), (-1,), (2, -1, 8),
    (-1, 2, 2, 4), (2, 2, -1, 4), (4, 1, -1, 4),
)  # fmt: skip


@st.composite
def steps(draw: st.DrawFn) -> Step:
    dim = draw(st.integers(-4, 3))
    other = draw(st.integers(-4, 3))

    def at(x: Tensor, which: int) -> int:
        return which % x.dim()

    turned: tuple[Step, ...] = (
        lambda x, _: x.transpose(at(x, dim), at(x, other)),
        lambda x, _: x.softmax(at(x, dim)),
        lambda x, _: nn.functional.layer_norm(x, x.shape[at(x, dim) :]),
        lambda x, _: x - x.amax(at(x, dim), keepdim=True),
        lambda x, _: torch.cat(x.chunk(2, at(x, dim))[::-1], at(x, other)),
        lambda x, _: x.unbind(at(x, dim))[0] if x.dim() > 2 else x,
        lambda x, _: x.movedim(at(x, dim), 0),
        lambda x, _: x.narrow(at(x, dim), 0, 2) if x.shape[at(x, dim)] % 2 == 0 else x,
    )
    shape = draw(st.sampled_from(SHAPES))
    return draw(st.one_of(st.sampled_from((*FIXED, *turned)), st.just(_reshaped(shape))))


class Program(nn.Module):
    def __init__(self, program: list[Step]) -> None:
        super().__init__()
        self.program = program

    def forward(self, x: Tensor) -> Any:
        now = x * 1.5
        first = now
        for step in self.program:
            now = step(now, first)
        return now * 0.5


@settings(max_examples=4 * settings.default.max_examples)
@given(st.lists(steps(), min_size=1, max_size=6))
def test_what_passes_gives_each_sample_its_own_numbers(program: list[Step]) -> None:
    model, x = Program(program), torch.rand(SAMPLES, TOKENS, WIDTH)
    try:
        trace = static_trace_with_batch(nn.Sequential(model), ((x.requires_grad_(),), {}), CPU)
    except TraceError:
        return
    if not mixing(trace, Section(("0",), 2)):
        with torch.no_grad():
            whole, parts = model(x), [model(it) for it in x.split(2)]
        torch.testing.assert_close(torch.cat(parts), whole, equal_nan=True)


@settings(max_examples=6 * settings.default.max_examples)
@given(st.lists(steps(), min_size=1, max_size=6), st.sampled_from([1, 2, 4]), st.booleans())
def test_what_passes_gives_each_token_its_own_numbers(
    program: list[Step], samples: int, longer: bool
) -> None:
    model, x = Program(program), torch.rand(samples, TOKENS + 2 * longer, WIDTH)
    try:
        trace = static_trace_with_batch(nn.Sequential(model), ((x.requires_grad_(),), {}), CPU, 1)
    except TraceError:
        return
    if not mixing(trace, Section(("0",), 2, along=1)):
        with torch.no_grad():
            whole, parts = model(x), [model(it.contiguous()) for it in x.split(2, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, equal_nan=True)
