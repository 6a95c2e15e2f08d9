"""Modules in slices inside of a captured graph give the numbers of the whole batch."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from belady.errors import SectionError
from belady.graph.capture import backend_of
from belady.graph.doors import compile_forward
from belady.ir.plan import Budget, Plan, Section
from belady.ir.trace import Trace
from belady.memory.carrier import Carrier
from belady.sections.unrolled import Unrolling
from tests.parity.graphs import PlannedHost
from tests.unit.sections.attentions import ATTENTIONS, Layer, Permuted, Split, sequences
from tests.unit.sections.comparing import assert_alike, children, run
from tests.unit.sections.test_batchnorm import SETTINGS
from tests.unit.sections.test_batchnorm import block as norms
from tests.unit.sections.test_batchnorm import images as small
from tests.unit.sections.test_blocks import CUTS, STACKS, images
from tests.unit.sections.test_dropout import convolutional, dense

WHOLE = Section(("",), 3)


@pytest.fixture(autouse=True)
def carrier() -> Iterator[Carrier]:
    carrier = Carrier("cpu")
    yield carrier
    carrier.close()
    torch._dynamo.reset()


def keep(trace: Trace) -> Plan:
    return Plan(trace.fingerprint, "keep/1", Budget(1 << 30))


class Captured:
    """Calls of a model as one graph, with modules of it in slices."""

    def __init__(
        self, model: nn.Module, carrier: Carrier, *sections: Section, whole: bool = True
    ) -> None:
        self.host = PlannedHost([model], carrier, keep)
        self.model = model
        self.unrolling = Unrolling(model, sections, lambda: True)
        own = self.unrolling.own
        forward = type(model).forward if own is None else own.run
        backend = backend_of(self.host, strict=whole, sliced=True)
        self.call = compile_forward(forward, backend, whole=whole)

    def __call__(self, *args: Any) -> Any:
        with self.unrolling.standing():
            return self.call(self.model, *args)

    def convolutions(self) -> list[int]:
        """How many of them ran in the forward of each graph."""
        return [
            sum("convolution.default" in op.name for op in drawn.trace.ops)
            for drawn in self.host.drawn
        ]


def outcome(
    model: nn.Module, call: Callable[..., Tensor], x: Tensor, *, seed: int = 5
) -> tuple[list[Any], Tensor]:
    """What an iteration gives, and the state of the generator after it."""
    torch.manual_seed(seed)

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return call(x)

    return run(Called(), x), torch.get_rng_state()


def assert_same(
    model: nn.Module,
    x: Tensor,
    carrier: Carrier,
    *sections: Section,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Compare two iterations; the second meets the running statistics of the first."""
    plain = copy.deepcopy(model).to(dtype)
    twin = copy.deepcopy(plain)
    attributes = [set(vars(it)) for it in twin.modules()]
    call = Captured(twin, carrier, *sections)
    x = x.detach().to(dtype).requires_grad_(x.requires_grad)
    for _ in range(2):
        expected, state = outcome(plain, plain, x)
        actual, other = outcome(twin, call, x)
        assert_alike(expected, actual, dtype)
        assert torch.equal(state, other)
    assert [set(vars(it)) for it in twin.modules()] == attributes


@pytest.mark.parametrize(("section", "needs_gradient"), [(CUTS[0], True), (CUTS[-1], False)])
@pytest.mark.parametrize("make", STACKS)
def test_blocks(
    make: Callable[[], nn.Sequential], section: Section, needs_gradient: bool, carrier: Carrier
) -> None:
    assert_same(make(), images(needs_gradient), carrier, section)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """By torch's version there, too, whose Dynamo may be another than where all else is tested."""
    carrier = Carrier("cuda")
    assert_same(STACKS[0]().cuda(), images(True).cuda(), carrier, CUTS[0])
    carrier.close()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_norms(settings: dict[str, Any], carrier: Carrier) -> None:
    x = small().requires_grad_()
    assert_same(norms(**settings), x, carrier, children(range(5), 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding(dtype: torch.dtype, carrier: Carrier) -> None:
    x = small().requires_grad_()
    assert_same(norms(), x, carrier, children(range(5), 3), dtype=dtype)


@pytest.mark.parametrize("numbers", [[1], [1, 2], [0, 1], [1, 2, 3], [3]])
def test_wherever_a_run_begins_and_ends(numbers: list[int], carrier: Carrier) -> None:
    assert_same(norms(), small().requires_grad_(), carrier, children(numbers, 7))


def test_several_runs(carrier: Carrier) -> None:
    assert_same(norms(), small(), carrier, children([0], 2), children([2, 3], 3))


def test_frozen_ones_and_the_mode_of_each(carrier: Carrier) -> None:
    model = norms()
    model[1].eval()
    model[3][1].requires_grad_(False)
    plain, call = copy.deepcopy(model), Captured(model, carrier, children(range(5), 3))
    for _ in range(2):
        expected, _ = outcome(plain, plain, small())
        actual, _ = outcome(model, call, small())
        assert_alike(expected, actual, torch.float32)
        for it in (plain, model):
            it[1].train(), it[3][1].eval()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_attention(attention: type[nn.Module], carrier: Carrier) -> None:
    for section in (Section(("attention",), 3), WHOLE):
        x = sequences(needs_gradient=True)
        assert_same(Layer(attention()), x, carrier, section)


@pytest.mark.parametrize("slices", [3, 4])
def test_dropouts_draw_for_the_whole_batch(slices: int, carrier: Carrier) -> None:
    for make, shape in ((dense, (4, 6)), (convolutional, (4, 3, 8, 8))):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
        assert_same(make(), x, carrier, Section(("",), slices))
        assert_same(make(), x, carrier, children(range(1, 4), slices))
    for attention in (Permuted(0.3), Split(0.3)):
        assert_same(Layer(attention), sequences(4), carrier, Section(("attention",), slices))


def test_a_dropout_draws_along_the_bytes_of_a_sample(carrier: Carrier) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(4, 4, 3))
    x = torch.randn(6, 3, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
    assert_same(model.to(memory_format=torch.channels_last), x, carrier, children(range(4), 3))


def test_each_slice_runs_its_own_ops_and_other_batches_are_captured_anew(carrier: Carrier) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2)).double()
    call = Captured(model, carrier, children(range(3), 4))
    for samples in (8, 3, 1, 8):
        x = torch.randn(samples, 3, 8, 8, dtype=torch.float64)
        torch.testing.assert_close(call(x), model(x), rtol=0, atol=1e-12)
    assert call.convolutions() == [4, 3, 1]


def test_what_fx_records_is_recorded_anew_where_it_changes(carrier: Carrier) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.times = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), 1

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.conv(x)) * self.times
            return y if self.times == 1 else y.tanh()

    model = Scaled().double()
    plain, call = copy.deepcopy(model), Captured(model, carrier, Section(("",), 2))
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    for times in (1, 3):
        model.times = plain.times = times
        torch.testing.assert_close(call(x), plain(x), rtol=0, atol=1e-12)
    plain.eval(), model.eval()
    torch.testing.assert_close(call(x), plain(x), rtol=0, atol=1e-12)


def test_outside_of_its_block_nothing_shows(carrier: Carrier) -> None:
    model = norms()
    call = Captured(model, carrier, children(range(5), 3))
    with pytest.raises(RuntimeError, match="size"):
        call(torch.randn(2, 5, 8, 8))
    assert all("forward" not in vars(it) for it in model.modules())


def test_a_hook_that_would_see_slices_is_refused(carrier: Carrier) -> None:
    model = norms()
    call = Captured(model, carrier, children(range(5), 3))
    model[0].register_forward_hook(lambda *_: None)
    with pytest.raises(SectionError, match="hooks"):
        call(small())
    assert all("forward" not in vars(it) for it in model.modules())


class Breaking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x * 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("section", [Section(("inner",), 2), Section(("",), 2)], ids=str)
def test_what_is_not_captured_to_its_end_has_the_same_numbers(
    section: Section, carrier: Carrier
) -> None:
    layers = nn.Linear(6, 6), Breaking(), nn.Dropout(0.5), nn.Linear(6, 3)
    model = nn.Sequential(OrderedDict(inner=nn.Sequential(*layers))).double()
    x = torch.randn(6, 6, dtype=torch.float64)
    call = Captured(model, carrier, section, whole=False)
    for _ in range(2):
        (one, state), (two, other) = outcome(model, model, x), outcome(model, call, x)
        assert torch.equal(state, other)
        assert_alike(one, two, torch.float64)


class Failing(nn.Module):
    fails = True

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return int("no number") * x if self.fails else x


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_call_that_fails_leaves_dropouts_as_they_were(carrier: Carrier) -> None:
    layers = nn.Linear(6, 6), nn.Dropout(0.5), Failing()
    model = nn.Sequential(OrderedDict(inner=nn.Sequential(*layers)))
    call = Captured(model, carrier, Section(("inner",), 2), whole=False)
    with pytest.raises(ValueError, match="no number"):
        call(torch.randn(6, 6))
    model.inner[2].fails = False
    for samples in (1, 6):
        assert call(torch.randn(samples, 6)).shape == (samples, 6)
