"""Blocks with a forward of their own and batch norms in the middle of it, as in a ResNet."""

from __future__ import annotations

import re
import threading
from collections import Counter
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
from belady.sections.allowed import reasons
from belady.sections.trial import trial
from belady.sections.wrap import wrap
from benchmarks.workloads.residual import Bottleneck, ResNet
from tests.support.training import footprint
from tests.unit.measure.watching import CPU
from tests.unit.sections.comparing import (
    TOLERANCES,
    assert_alike,
    assert_same_in_sections,
    children,
    run,
    twins,
)
from tests.unit.sections.test_apply import peak, shapes, traces

CHANNELS = 16


class Basic(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(CHANNELS)
        self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return torch.relu(self.bn2(self.conv2(y)) + x)


class Late(Basic):
    """The way around has a norm of its own, and comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.around = nn.Sequential(
            nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False), nn.BatchNorm2d(CHANNELS)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.bn1(self.conv1(x)).relu())
        y = self.bn2(y)
        y += self.around(x)
        return torch.relu(y)


class Before(Basic):
    """Norms come before convolutions: what goes into one goes around it as well."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(x)
        y = self.conv1(torch.relu(self.bn1(x)))
        return x + self.conv2(torch.relu(self.bn2(y)))


class Calling(nn.Module):
    """A convolution, a norm, and a function that may do anything with them."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.norm = nn.BatchNorm2d(CHANNELS)
        self.scale = nn.Parameter(torch.ones(CHANNELS, 1, 1))
        self.times = 1
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def images(needs_gradient: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(7, CHANNELS, 8, 8, generator=generator).requires_grad_(needs_gradient)


def stacked(*blocks: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for block in blocks))


def bottlenecks() -> nn.Sequential:
    return stacked(lambda: Bottleneck((16, 4), 1), lambda: Bottleneck((16, 8), 2))


STACKS: list[Callable[[], nn.Sequential]] = [
    bottlenecks,
    lambda: stacked(Basic, lambda: nn.Conv2d(16, 16, 1), Basic),
    lambda: stacked(Late, Basic),
    lambda: stacked(Before, Before),
]
CUTS = [children([0], 2), children([1], 3), children([0, 1], 3), Section(("",), 4)]


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("section", CUTS, ids=str)
@pytest.mark.parametrize("make", STACKS)
def test_blocks_give_the_numbers_of_the_whole_batch(
    make: Callable[[], nn.Sequential], section: Section, needs_gradient: bool
) -> None:
    for dtype in (torch.float64, torch.float32):
        assert_same_in_sections(make(), images(needs_gradient), section, dtype=dtype)


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("section", CUTS, ids=str)
@pytest.mark.parametrize("make", STACKS)
def test_the_trace_foretells_saves_and_peak(
    make: Callable[[], nn.Sequential], section: Section, needs_gradient: bool
) -> None:
    _, predicted, real = traces(make(), images(needs_gradient), section)
    assert peak(predicted) == peak(real)
    assert shapes(predicted) == shapes(real)
    # All but vectors of one number a channel, of which there are up to 32.
    assert large(predicted) == large(real)


def large(trace: Any) -> Counter[Any]:
    return Counter((it.nbytes, it.kind) for it in trace.storages if it.nbytes > 32 * 4)


def test_a_whole_network_is_one_section() -> None:
    torch.manual_seed(0)
    model, x = ResNet((2, 1, 1, 1), 4), torch.randn(6, 3, 64, 64)
    section = Section(("",), 3)
    assert_same_in_sections(model, x, section)
    _, predicted, real = traces(model, x, section)
    assert peak(predicted) == peak(real)
    assert shapes(predicted) == shapes(real)


def test_autocast_stays_within_rounding() -> None:
    model, twin, _ = twins(bottlenecks(), children([0, 1], 3), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = run(model, images(True)), run(twin, images(True))
    scale = max(it.abs().max().item() for it in expected[1])
    for one, two in zip(expected[1], actual[1], strict=True):
        assert (one - two).abs().max() <= TOLERANCES[torch.bfloat16] * scale
    assert_alike(expected[2], actual[2], torch.bfloat16)


def test_frozen_parts_and_two_backwards() -> None:
    model = stacked(Late, Before)
    model[0].conv1.requires_grad_(False)
    model[0].bn2.requires_grad_(False)

    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    for x in (images(), images(True)):
        assert_same_in_sections(model, x, children([0, 1], 3), backward=twice)


def test_nothing_shows_and_the_next_call_sees_what_has_changed() -> None:
    model = stacked(Late, Basic).double()
    x = images().double()
    before = footprint(model.modules())
    names = list(model.state_dict())
    undo = wrap(model, [children([0, 1], 3)])
    model(x).sum().backward()
    model[0].bn1.eval()
    model[1].conv1 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1).double()
    sectioned = model(x)
    assert list(model.state_dict()) == names
    undo()
    torch.testing.assert_close(sectioned, model(x))
    assert footprint(model.modules()) == before


def test_what_forward_chooses_by_attributes_is_chosen_in_each_call() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        return y * 2 if self.times > 1 else y

    model = stacked(lambda: Calling(function)).double()
    x = images().double()
    wrap(model, [children([0], 2)])
    once = model(x)
    model[0].times = 2
    torch.testing.assert_close(model(x), once * 2)


REFUSED: list[tuple[Callable[[Any, Tensor], Any], str]] = [
    (lambda self, x: self.norm(x) if x.sum() > 0 else x, "control flow|bool"),
    (lambda self, x: (self.norm(x), x), "something else than one tensor"),
    (lambda self, x: self.norm(x) * self.scale, "a tensor of its own"),
    (lambda self, x: self.norm(x) * torch.ones(8), "a tensor of its own"),
    (lambda self, x: setattr(self, "times", 2) or self.norm(x), "changes the attribute 'times'"),
    (lambda self, x: setattr(x, "note", 1) or self.norm(x), "sets the attribute 'note'"),
    (lambda self, x: self.norm(x.data), "reads the attribute 'data'"),
    (lambda self, x: checkpoint(self.norm, x, use_reentrant=False), "in a checkpoint"),
    (lambda self, x: without_grad(self.norm, x), "another mode of grad"),
]


def without_grad(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return module(x)


@pytest.mark.parametrize(("function", "reason"), REFUSED)
def test_what_is_no_line_of_calls_is_refused(
    function: Callable[[Any, Tensor], Any], reason: str
) -> None:
    model = stacked(lambda: Calling(function))
    with pytest.raises(SectionError, match=reason):
        wrap(model, [children([0], 2)])
    assert model[0].times == 1
    assert "forward" not in vars(model[0])


def test_a_write_of_what_a_norm_has_saved_is_the_usual_error() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        y = self.conv(x)
        y += self.norm(y)
        return y

    model = stacked(lambda: Calling(function))
    for sections in ([], [children([0], 2)]):
        wrap(model, sections)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(images()).sum().backward()


def in_place_of_input(self: Any, x: Tensor) -> Tensor:
    x += 1
    return self.norm(self.conv(x))


def write_of_what_nobody_else_has(self: Any, x: Tensor) -> Tensor:
    y = self.norm(x)
    y += self.norm(self.conv(x))
    return y


def write_of_what_is_read_again(self: Any, x: Tensor) -> Tensor:
    y = z = torch.neg(self.norm(x)).view(x.shape)
    y += self.norm(self.conv(x))
    return self.norm(z)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (in_place_of_input, "iadd writes the input of the section in place"),
        (lambda self, x: self.norm(x).mul_(x.size(0)) * x.size(0), None),
        (lambda self, x: torch.cat([self.norm(x).chunk(2, 1)[1], x], 1), None),
        (write_of_what_nobody_else_has, None),
        (write_of_what_is_read_again, "iadd writes .* is read again"),
    ],
)
def test_writes_across_norms_are_refused_and_numbers_and_tuples_between_are_not(
    function: Callable[[Any, Tensor], Any], reason: str | None
) -> None:
    model = stacked(lambda: Calling(function))
    wrap(model, [children([0], 7)])
    if reason is None:
        assert model(images()).shape[0] == 7
        return
    with pytest.raises(SectionError, match=reason):
        model(images())


def test_hooks_inside_a_block_are_refused() -> None:
    model = stacked(Late, Basic)
    model[0].around.register_forward_hook(lambda *_: None)
    with pytest.raises(SectionError, match=re.escape("has hooks")):
        wrap(model, [children([0, 1], 2)])
    model[1].register_forward_hook(lambda *_: None)
    wrap(model, [children([1], 2)])


def test_other_threads_may_run_modules_meanwhile() -> None:
    other, seen = nn.Linear(2, 2), []

    def function(self: Any, x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: seen.append(other(torch.ones(1, 2))))
        thread.start()
        thread.join()
        return self.norm(self.conv(x))

    model = stacked(lambda: Calling(function))
    wrap(model, [children([0], 2)])
    model(images())
    assert [type(it) for it in seen] == [Tensor, Tensor]


def test_blocks_are_allowed_and_pass_their_trial() -> None:
    model, x = bottlenecks(), images(True)
    section = children([0, 1], 3)
    assert reasons(model, section, static_trace_with_batch(model, ((x,), {}), CPU)) == ()
    found = trial(model, section, x)
    assert max(found.outputs, found.gradients, found.buffers) <= found.tolerance
