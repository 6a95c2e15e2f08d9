"""What `ir.sections.apply` says beside what the execution does, op by op."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from belady.errors import PlanMismatchError
from belady.ir.curves import curve
from belady.ir.files import validate
from belady.ir.hardware import Allocator
from belady.ir.plan import Budget, Plan, Section
from belady.ir.sections import apply, names
from belady.ir.trace import Trace
from belady.measure.static import static_trace
from belady.sections.wrap import wrap
from tests.unit.measure.watching import CPU, Watch, observed, ops_named, saves_of
from tests.unit.sections.comparing import children


class Branching(nn.Module):
    """Reads its input twice, and joins."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(4, 4, 3, padding=1)
        self.right = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.left(x)) * self.right(x) + x


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 5),
    )


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 5),
    )


def images(size: int, needs_gradient: bool = False) -> Tensor:
    return torch.randn(5, 3, size, size).requires_grad_(needs_gradient)


def traces(model: nn.Module, x: Tensor, *sections: Section) -> tuple[Trace, Trace, Trace]:
    """The trace without sections, with them as predicted, and with them as observed."""
    twin = copy.deepcopy(model)
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        other.grad = None if parameter.grad is None else parameter.grad.clone()
    plain = observed(model, x)
    x.grad = None
    wrap(twin, sections)
    real = observed(twin, x)
    predicted = apply(plain, sections)
    validate(predicted)
    return plain, predicted, real


def timeless(trace: Trace) -> Trace:
    return replace(trace, ops=tuple(replace(op, host_seconds=0.0) for op in trace.ops))


def peak(trace: Trace) -> int:
    return max(curve(trace, Plan(trace.fingerprint, "", Budget(0)), Allocator(1, 0.0, 0)))


CUTS: list[tuple[Section, ...]] = [
    (children([0, 1], 2),),
    (children([2, 3, 4], 2),),
    (children(range(5), 3),),
    (children([2], 5),),
    (Section(("",), 3),),
    (children([0, 1], 2), children([2, 3, 4], 3)),
    (children([4, 5], 2), children([6], 3)),
]


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("sections", CUTS, ids=str)
def test_the_trace_is_that_of_the_execution(
    sections: tuple[Section, ...], needs_gradient: bool
) -> None:
    plain, predicted, real = traces(network(), images(8, needs_gradient), *sections)
    assert timeless(predicted) == timeless(real)
    assert predicted.fingerprint == real.fingerprint != plain.fingerprint


@pytest.mark.parametrize("sections", CUTS, ids=str)
def test_gradients_that_are_there_already_are_added_to(sections: tuple[Section, ...]) -> None:
    model = network()
    model(images(8)).sum().backward()
    _, predicted, real = traces(model, images(8), *sections)
    # Autograd adds them in an order of its own.
    assert Counter(op.name for op in predicted.ops) == Counter(op.name for op in real.ops)
    assert peak(predicted) == peak(real)
    assert [save for _, save in saves_of(predicted)] == [save for _, save in saves_of(real)]


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize(
    "sections",
    [
        (children(range(3), 2),),
        (children([1, 2], 3),),
        (children([1], 3),),
        (children(range(7), 3),),
        (Section(("",), 5),),
        (children(range(3), 2), children(range(3, 7), 3)),
    ],
    ids=str,
)
def test_batch_norms_save_and_hold_what_the_execution_does(
    sections: tuple[Section, ...], needs_gradient: bool
) -> None:
    _, predicted, real = traces(normed(), images(16, needs_gradient), *sections)
    assert peak(predicted) == peak(real)
    assert shapes(predicted) == shapes(real)
    # All but vectors of one number a channel.
    assert large(predicted) == large(real)


CHANNELS = 4


def shapes(trace: Trace) -> list[Any]:
    return [
        (
            save.ordinal, save.module, save.shape, save.stride, save.offset, save.dtype,
            len(save.reads),
        )
        for _, save in saves_of(trace)
    ]  # fmt: skip


def large(trace: Trace) -> Counter[Any]:
    return Counter(
        (item.nbytes, item.kind) for item in trace.storages if item.nbytes > CHANNELS * 4
    )


def test_modules_with_a_forward_of_their_own() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), Branching(), nn.Sequential(Branching(), nn.Tanh()))
    for sections in ((children([1], 2),), (children([1, 2], 3),), (children(range(3), 2),)):
        _, predicted, real = traces(model, images(16), *sections)
        assert shapes(predicted) == shapes(real)
        assert large(predicted) == large(real)
        assert peak(predicted) == peak(real)


def test_static_traces_too() -> None:
    model, x, section = network(), images(8), children(range(5), 3)
    predicted = apply(static_trace(model, ((x,), {}), CPU), [section])
    wrap(model, [section])
    real = static_trace(model, ((x,), {}), CPU)
    assert [op.name for op in predicted.ops] == [op.name for op in real.ops]
    assert [save for _, save in saves_of(predicted)] == [save for _, save in saves_of(real)]
    assert Counter(predicted.storages) == Counter(real.storages)


def test_costs_are_divided_and_host_time_is_not() -> None:
    plain = observed(network(), images(8), timed=True)
    at = ops_named(plain, "convolution.default")[1]
    costly = replace(
        plain.ops[at], device_seconds=10.0, host_seconds=1.0, workspace_bytes=7, replayable=True
    )
    plain = replace(plain, ops=(*plain.ops[:at], costly, *plain.ops[at + 1 :]))
    cut = apply(plain, [children([2, 3], 2)])
    slices = [op for op in cut.ops if op.module == "2" and op.name == costly.name]
    assert [op.device_seconds for op in slices] == [6.0, 4.0]
    assert [op.host_seconds for op in slices] == [1.0, 1.0]
    assert [op.workspace_bytes for op in slices] == [5, 3]


def test_values_have_names() -> None:
    plain = observed(network(), images(8))
    sections = [children([2, 3, 4], 2)]
    cut = apply(plain, sections)
    found = names(plain, sections)
    assert len(found) == len(cut.values)
    relu = next(v for v, value in enumerate(plain.values) if value.producer == 3)
    pool = next(v for v, value in enumerate(plain.values) if value.producer == 4)
    assert {(relu, 0), (relu, 1), (pool, 0), (pool, 1), (pool, -1)} <= set(found)
    assert (relu, -1) not in found
    for (origin, part), value in zip(
        [name or (-1, -1) for name in found], cut.values, strict=True
    ):  # fmt: skip
        if origin >= 0 and part >= 0:
            whole = plain.storages[plain.values[origin].storage].nbytes
            assert cut.storages[value.storage].nbytes in (whole * 2 // 5, whole * 3 // 5, whole)


def test_every_pass_of_a_root_is_cut_and_two_roots_are_not_guessed_between() -> None:
    model, other = network(), nn.Sequential(nn.Linear(5, 5))
    section = children([2, 3], 2)

    def iteration(*roots: nn.Module) -> Trace:
        watch = Watch(*roots)
        value: Any = images(8)
        losses = []
        for root in roots:
            losses.append(watch.call(root, value))
            value = losses[-1] if root is model and other in roots else images(8)
        losses[-1].sum().backward()
        if other not in roots:
            losses[0].sum().backward()
        return watch.finish()

    twice = iteration(model, model)
    assert len(ops_named(apply(twice, [section]), "relu.default")) == 4
    with pytest.raises(PlanMismatchError, match="Sequential and TwoRoots"):
        apply(replace(twice, roots=("Sequential", "TwoRoots")), [section])
    assert len(ops_named(apply(iteration(model, other), [section]), "relu.default")) == 2


def test_no_section_changes_nothing() -> None:
    plain = observed(normed(), images(16))
    assert apply(plain, []) == plain


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ (x.T @ x)


@pytest.mark.parametrize(
    ("model", "section", "reason"),
    [
        (nn.Sequential(nn.Linear(4, 4)), Section(("7",), 2), "no pass of this trace has ops of it"),
        (nn.Sequential(nn.Linear(4, 4)), Section(("0",), 9), "fewer samples than there are slices"),
        (Twice(), Section(("layer",), 2), "not consecutive, or it is called more"),
        (nn.Sequential(nn.Linear(4, 4), Mixing()), Section(("1",), 2), "batch cannot be told"),
    ],
)
def test_what_a_trace_cannot_show_is_refused(
    model: nn.Module, section: Section, reason: str
) -> None:
    plain = observed(model, torch.randn(8, 4))
    with pytest.raises(PlanMismatchError, match=reason):
        apply(plain, [section])
