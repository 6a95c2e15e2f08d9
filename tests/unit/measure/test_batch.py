from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from belady.ir.ops import FOLDED, SPREAD
from belady.ir.trace import Trace
from belady.measure.batch import static_trace_with_batch
from belady.measure.static import static_trace
from tests.support.models import Block, ResidualCNN
from tests.unit.measure.watching import CPU, op_named, ops_named


def traced(module: nn.Module, *args: Any) -> Trace:
    return static_trace_with_batch(module, (args, {}), CPU)


def test_the_batch_is_found_and_nothing_else_changes() -> None:
    module, x = ResidualCNN(), torch.rand(4, 3, 16, 16)
    trace = traced(module, x)
    convolution = trace.ops[ops_named(trace, "convolution.default")[0]]
    assert convolution.batch_dims == (0, None, None)
    # The last layer multiplies by a transposed weight; its gradient contracts over the batch.
    assert op_named(trace, "addmm.default")[1].batch_dims == (None, 0, None)
    assert (1, 0) in {trace.ops[index].batch_dims for index in ops_named(trace, "mm.default")}
    assert all(op.batch_dims == () for op in static_trace(module, ((x,), {}), CPU).ops)
    assert trace.fingerprint == static_trace(module, ((x,), {}), CPU).fingerprint


def test_a_batch_folded_into_rows_is_told_from_one_dimension() -> None:
    trace = traced(Block(16, 2), torch.rand(2, 5, 16))
    assert trace.ops[ops_named(trace, "addmm.default")[0]].batch_dims == (None, FOLDED, None)
    # The weight's gradient contracts over the rows, which stand last.
    assert (SPREAD, FOLDED) in {
        trace.ops[index].batch_dims for index in ops_named(trace, "mm.default")
    }
    norms = ops_named(trace, "native_layer_norm.default")
    assert {trace.ops[index].batch_dims for index in norms} == {(0, None, None)}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layer(x) + y


def test_channels_last_keeps_its_strides() -> None:
    x = torch.rand(4, 3, 16, 16).to(memory_format=torch.channels_last)
    trace = traced(ResidualCNN(), x)
    assert trace.ops[ops_named(trace, "convolution.default")[0]].batch_dims == (0, None, None)


def test_without_a_common_first_dimension_nothing_is_known() -> None:
    for other in (torch.ones(1, 4), torch.ones(())):
        trace = traced(Two(), torch.ones(3, 4), other)
        assert all(op.batch_dims == () for op in trace.ops)
    assert op_named(traced(Two(), torch.ones(3, 4), torch.ones(3, 4)), "add.Tensor")[
        1
    ].batch_dims == (0, 0)


class Fussy(nn.Module):
    """Refuses a batch of another size, or runs other ops."""

    def __init__(self, *, refuses: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.refuses = refuses

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != 3:
            if self.refuses:
                raise ValueError("three at a time")
            x = x.exp()
        return self.layer(x)


def test_where_another_batch_does_not_run_the_same_nothing_is_known() -> None:
    for refuses in (True, False):
        trace = traced(Fussy(refuses=refuses), torch.ones(3, 4))
        assert trace.ops
        assert all(op.batch_dims == () for op in trace.ops)


def along_tokens(module: nn.Module, *args: Any) -> Trace:
    return static_trace_with_batch(module, (args, {}), CPU, along=1)


def test_tokens_are_found_in_one_sequence_and_in_several() -> None:
    for samples, rows in ((1, 0), (2, FOLDED)):
        trace = along_tokens(Block(16, 2), torch.rand(samples, 5, 16))
        addmm = [trace.ops[index].batch_dims for index in ops_named(trace, "addmm.default")]
        assert set(addmm) == {(None, rows, None)}
        norms = ops_named(trace, "native_layer_norm.default")
        assert {trace.ops[index].batch_dims for index in norms} == {(1, None, None)}
        assert trace.fingerprint == traced(Block(16, 2), torch.rand(samples, 5, 16)).fingerprint


def test_a_norm_over_all_of_a_sequence_acts_along_its_tokens() -> None:
    class Normed(nn.Module):
        def forward(self, x: Tensor, dims: int) -> Tensor:
            return nn.functional.layer_norm(x, x.shape[dims:])

    for dims, expected in ((2, 1), (1, SPREAD)):
        trace = along_tokens(Normed(), torch.rand(2, 5, 16, requires_grad=True), dims)
        assert op_named(trace, "native_layer_norm.default")[1].batch_dims == (expected,)


def test_more_tokens_than_a_model_allows_are_not_asked_for() -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Embedding(5, 16)

        def forward(self, x: Tensor) -> Tensor:
            assert x.shape[1] <= 5
            return x.tanh() + self.places.weight[: x.shape[1]]

    trace = along_tokens(Placed(), torch.rand(1, 5, 16, requires_grad=True))
    assert op_named(trace, "tanh.default")[1].batch_dims == (1,)


def test_of_two_tokens_nothing_is_known() -> None:
    for x in (torch.ones(3, 2, 4), torch.ones(4)):
        trace = along_tokens(nn.Linear(4, 4), x)
        assert all(op.batch_dims == () for op in trace.ops)


def test_strides_of_a_call_are_those_of_fewer_tokens() -> None:
    x = torch.rand(2, 16, 5).mT.requires_grad_()
    trace = along_tokens(nn.Sequential(nn.Tanh(), nn.Linear(16, 4)), x)
    assert op_named(trace, "tanh.default")[1].batch_dims == (1,)
