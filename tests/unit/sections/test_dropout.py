from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from belady.errors import SectionError
from belady.ir.plan import Section
from belady.measure.batch import static_trace_with_batch
from belady.sections import dropout
from belady.sections.allowed import reasons
from belady.sections.trial import trial
from belady.sections.wrap import wrap
from tests.support.training import footprint
from tests.unit.measure.watching import CPU
from tests.unit.sections.comparing import assert_alike, children, run, twins
from tests.unit.sections.test_apply import timeless, traces

P = 0.3


class Feedforward(nn.Module):
    """Drops with one module twice, in the middle of a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 12)
        self.narrow = nn.Linear(12, 6)
        self.dropout = nn.Dropout(P)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.narrow(self.dropout(F.gelu(self.wide(x)))))


class Calling(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.dropout = nn.Dropout(P)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def dense() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(P), Feedforward(), nn.Linear(6, 3))


def convolutional() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Dropout(P),
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Dropout(0.5),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(P),
        nn.Conv2d(4, 4, 3),
    )


def drawing(model: nn.Module, x: Tensor, **given: Any) -> tuple[list[Any], Tensor]:
    """What an iteration from one random state gives, and the random state after it."""
    torch.manual_seed(5)
    return run(model, x, **given), torch.get_rng_state()


def assert_draws_alike(
    model: nn.Module, x: Tensor, section: Section, dtype: torch.dtype = torch.float64, **given: Any
) -> None:
    plain, twin, undo = twins(model, section, dtype=dtype)
    x = x.detach().to(dtype).requires_grad_(x.requires_grad)
    expected, state = drawing(plain, x, **given)
    actual, other = drawing(twin, x, **given)
    assert torch.equal(state, other)
    assert_alike(expected, actual, dtype)
    undo()


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_results_and_generator_are_those_of_the_whole_batch(
    dtype: torch.dtype, needs_gradient: bool
) -> None:
    for shape in ((7, 6), (7, 5, 6)):
        x = torch.randn(shape).requires_grad_(needs_gradient)
        for section in (children(range(5), 3), children([2, 3], 7), Section(("",), 2)):
            assert_draws_alike(dense(), x, section, dtype)
    x = torch.randn(5, 3, 6, 6).requires_grad_(needs_gradient)
    for images in (x, x.to(memory_format=torch.channels_last)):
        assert_draws_alike(convolutional(), images, children(range(7), 2), dtype)
        assert_draws_alike(convolutional(), images, children(range(1, 5), 5), dtype)


def test_forward_has_the_bits_of_the_whole_batch() -> None:
    plain, twin, _ = twins(nn.Sequential(nn.Tanh(), nn.Dropout(P)), children(range(2), 3))
    x = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    assert torch.equal(drawing(plain, x)[0][0], drawing(twin, x)[0][0])


def test_evaluation_and_probabilities_that_leave_nothing_to_chance_draw_nothing() -> None:
    x = torch.randn(6, 6, requires_grad=True)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0), nn.Dropout(P), nn.Linear(6, 6))
    assert_draws_alike(model.eval(), x, children(range(4), 3))
    assert_draws_alike(nn.Sequential(nn.Tanh(), nn.Dropout(1)), x, children(range(2), 3))


def test_backward_habits() -> None:
    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    x = torch.randn(7, 6, requires_grad=True)
    assert_draws_alike(dense(), x, children(range(5), 3), backward=twice)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_draws_the_same_again(reentrant: bool) -> None:
    plain, twin, _ = twins(dense(), children(range(5), 3))
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    found = []
    for model in (plain, twin):
        inside = nn.Sequential(
            Calling(lambda self, x: checkpoint(self.inner, x, use_reentrant=reentrant))
        )
        inside[0].inner = model
        found.append(drawing(inside, x))
    assert torch.equal(found[0][1], found[1][1])
    assert_alike(found[0][0], found[1][0], torch.float64)


def test_nothing_is_left_behind() -> None:
    model = dense()
    before = footprint(model.modules())
    undo = wrap(model, [children(range(5), 3)])
    model(torch.randn(7, 6)).sum().backward()
    undo()
    assert footprint(model.modules()) == before
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_copy_of_a_model_draws_for_itself() -> None:
    model = dense()
    wrap(model, [children(range(5), 3)])
    twin = copy.deepcopy(model)
    wrap(twin, [children(range(5), 2)])
    x = torch.randn(8, 6)
    assert_alike(drawing(model, x)[0], drawing(twin, x)[0], torch.float32)
    assert "forward" in vars(twin)


def test_a_dropout_may_be_cut_and_is_tried() -> None:
    for model, x in ((dense(), torch.randn(7, 6)), (convolutional(), torch.randn(7, 3, 8, 8))):
        section = children(range(len(model)), 3)
        state = torch.get_rng_state()
        assert reasons(model, section, static_trace_with_batch(model, ((x,), {}), CPU)) == ()
        trial(model, section, x)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("section", [children(range(5), 3), children([1, 2], 7)], ids=str)
def test_the_trace_is_that_of_the_execution(section: Section, needs_gradient: bool) -> None:
    _, predicted, real = traces(dense(), torch.randn(7, 6).requires_grad_(needs_gradient), section)
    assert timeless(predicted) == timeless(real)


def test_a_mask_is_drawn_with_scratch_of_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    # What a GPU runs, by the same ops.
    monkeypatch.setattr(dropout, "drawn", lambda like, p: torch.native_dropout(like, p, True)[1])
    monkeypatch.setattr(
        nn.Dropout, "forward", lambda self, x: torch.native_dropout(x, self.p, self.training)[0]
    )
    x = torch.randn(7, 6)
    model = nn.Sequential(*dense()[:3], nn.Linear(6, 6), nn.Tanh())
    section = children(range(5), 3)
    assert reasons(model, section, static_trace_with_batch(model, ((x,), {}), CPU)) == ()
    assert_draws_alike(model, x, section, torch.float32)
    _, predicted, real = traces(model, x, section)
    assert timeless(predicted) == timeless(real)


REFUSED: list[tuple[nn.Module, Section, str]] = [
    (nn.Dropout(P), Section(("",), 2), "is all of the section, and draws"),
    (nn.Sequential(nn.Tanh(), nn.Dropout(P, inplace=True)), children(range(2), 2), "draws random"),
    (nn.Sequential(nn.Tanh(), nn.Dropout1d(P)), children(range(2), 2), "draws random"),
    (nn.Sequential(nn.Tanh(), nn.AlphaDropout(P)), children(range(2), 2), "draws random"),
]


@pytest.mark.parametrize(("model", "section", "reason"), REFUSED)
def test_other_dropouts_are_refused(model: nn.Module, section: Section, reason: str) -> None:
    with pytest.raises(SectionError, match=reason):
        wrap(model, [section])


def replaying(self: Any, x: Tensor) -> Tensor:
    return checkpoint(self.dropout, x, use_reentrant=False)


def sometimes(self: Any, x: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return self.dropout(x) if self.calls == 1 else x


def more_often(self: Any, x: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return self.dropout(x) if self.calls > 1 else x


REFUSED_BY_A_CALL: list[tuple[Callable[[Any, Tensor], Tensor], str]] = [
    (replaying, "in a checkpoint, which would draw anew"),
    (lambda self, x: self.dropout(x[:, ::2]), "dense and one after another"),
    (lambda self, x: self.dropout(x.T).T, "dense and one after another"),
    (lambda self, x: self.dropout(x.flatten()).view_as(x), "dense and one after another"),
    (sometimes, "not called equally often"),
    (more_often, "not called alike"),
]


@pytest.mark.parametrize(("function", "reason"), REFUSED_BY_A_CALL)
def test_what_only_a_call_shows_is_refused(
    function: Callable[[Any, Tensor], Tensor], reason: str
) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Calling(function))
    wrap(model, [children(range(2), 2)])
    with pytest.raises(SectionError, match=reason):
        model(torch.randn(8, 6))
