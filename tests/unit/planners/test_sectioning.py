"""Which modules run in slices: where one op is over the budget, and no more than it takes."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from belady.ir.along import Dims
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Budget, Section
from belady.ir.sections import apply
from belady.ir.trace import Trace
from belady.measure.batch import static_trace_with_batch
from belady.measure.held import with_state
from belady.planners import smallest_budget
from belady.planners.least import Least
from belady.planners.sectioning import Sectioning, over_budget
from belady.planners.workspace import with_workspaces
from tests.unit.planners.nets import gpu

PLENTY = Budget(1 << 40)


def group(inside: int, out: int) -> list[nn.Module]:
    convs = [nn.Conv2d(inside, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)]
    return [convs[0], nn.ReLU(inplace=True), convs[1], nn.ReLU(inplace=True), nn.MaxPool2d(2)]


def flat() -> nn.Sequential:
    return nn.Sequential(*group(3, 16), *group(16, 32), *group(32, 32))


def nested() -> nn.Sequential:
    parts = (group(3, 16), group(16, 32), group(32, 32))
    return nn.Sequential(*(nn.Sequential(*part) for part in parts))


@functools.cache
def traced(make: object) -> tuple[Trace, list[tuple[str, ...]]]:
    assert callable(make)
    model: nn.Sequential = make()
    call = ((torch.randn(16, 3, 64, 64),), {})
    traced = with_state(static_trace_with_batch(model, call, torch.device("cpu")), 2)
    storages = tuple(replace(storage, device="cuda") for storage in traced.storages)
    trace = replace(traced, device="cuda", storages=storages)
    chains = [
        tuple(f"{name}.{child}".lstrip(".") for child, _ in module.named_children())
        for name, module in model.named_modules()
        if isinstance(module, nn.Sequential)
    ]
    return trace, chains


def everything(_: Section) -> bool:
    return True


def sections_for(
    trace: Trace,
    hardware: HardwareProfile,
    budget: Budget,
    chains: Sequence[tuple[str, ...]],
    may: Callable[[Section], bool],
) -> tuple[Section, ...] | None:
    return Sectioning(trace, Least(hardware, budget), chains, may).within(budget.device_bytes)


def floor_of(trace: Trace, sections: Sequence[Section] = ()) -> int:
    cut = apply(trace, sections) if sections else trace
    return smallest_budget("floor", cut, gpu(), PLENTY)


@pytest.mark.parametrize("make", [flat, nested])
def test_nothing_is_cut_when_it_fits(make: object) -> None:
    trace, chains = traced(make)
    assert sections_for(trace, gpu(), Budget(floor_of(trace)), chains, everything) == ()


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5, 0.35])
@pytest.mark.parametrize("make", [flat, nested])
def test_what_is_cut_fits(make: object, share: float) -> None:
    trace, chains = traced(make)
    budget = Budget(int(floor_of(trace) * share))
    found = sections_for(trace, gpu(), budget, chains, everything)
    assert found
    assert floor_of(trace, found) <= budget.device_bytes
    names = [name for section in found for name in section.modules]
    assert len(names) == len(set(names))
    for section in found:
        # One slice fewer, or one section, and it would not fit.
        rest = [it for it in found if it is not section]
        fewer = (
            [*rest, Section(section.modules, section.slices // 2)] if section.slices > 2 else rest
        )
        assert floor_of(trace, fewer) > budget.device_bytes


def test_parts_of_a_long_stretch_that_need_no_slices_have_none() -> None:
    trace, chains = traced(nested)
    budget = Budget(int(floor_of(trace) * 0.22))
    assert floor_of(trace, [Section(("0", "1", "2"), 16)]) <= budget.device_bytes
    found = sections_for(trace, gpu(), budget, [chains[0]], everything)
    assert found is not None
    assert found == (Section(("0", "1"), 16),)
    assert floor_of(trace, found) <= budget.device_bytes


def test_smaller_budgets_take_more_slices() -> None:
    trace, chains = traced(flat)
    whole = floor_of(trace)
    counts = []
    for share in (0.9, 0.7, 0.5, 0.35):
        found = sections_for(trace, gpu(), Budget(int(whole * share)), chains, everything)
        assert found is not None
        counts.append(max(section.slices for section in found))
    assert all(one <= two for one, two in pairwise(counts))
    assert counts[0] < counts[-1]


def test_nothing_that_may_not_be_cut_is() -> None:
    trace, chains = traced(flat)
    asked: list[Section] = []

    def never(section: Section) -> bool:
        asked.append(section)
        return False

    assert sections_for(trace, gpu(), Budget(floor_of(trace) // 2), chains, never) is None
    # Whether a stretch may be cut does not depend on the number of slices.
    assert len(asked) == len({section.modules for section in asked}) > 0


def test_there_is_a_limit() -> None:
    trace, chains = traced(flat)
    assert sections_for(trace, gpu(), Budget(1 << 16), chains, everything) is None
    assert sections_for(trace, gpu(), Budget(floor_of(trace) // 2), [], everything) is None


def test_weights_that_autocast_casts_do_not_hide_the_batch() -> None:
    model = nested()
    call = ((torch.randn(16, 3, 64, 64),), {})
    with torch.autocast("cpu", torch.bfloat16):
        trace = static_trace_with_batch(model, call, torch.device("cpu"))
    assert "aten._to_copy.default" in {op.name for op in trace.ops}
    assert floor_of(trace, [Section(("1",), 4)]) < floor_of(trace)


def test_what_convolutions_ask_for_beside_their_operands_is_counted() -> None:
    trace, chains = traced(nested)
    asking = with_workspaces(trace, 2.0)
    for op in asking.ops:
        if "convolution" in op.name:
            inputs = [trace.storages[trace.values[value].storage].nbytes for value in op.reads]
            made = trace.storages[trace.values[op.writes[0]].storage].nbytes
            assert op.workspace_bytes == 2 * (sum(inputs) + made * ("backward" not in op.name))
        else:
            assert op.workspace_bytes == 0
    budget = Budget(floor_of(trace))
    assert over_budget(trace, Least(gpu(), budget)) <= 0 < over_budget(asking, Least(gpu(), budget))
    assert sections_for(trace, gpu(), budget, chains, everything) == ()
    found = sections_for(asking, gpu(), budget, chains, everything)
    assert found
    assert floor_of(asking, found) <= budget.device_bytes


def test_the_collector_rests_while_slices_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, chains = traced(nested)
    resting, asked = [], []

    def needs(*_: object) -> tuple[int, str]:
        resting.append(not gc.isenabled())
        return 1 << 40, "1"

    def may(_: Section) -> bool:
        asked.append(gc.isenabled())
        return True

    monkeypatch.setattr(Least, "needed", needs)
    assert sections_for(trace, gpu(), Budget(1), chains, may) is None
    assert resting
    assert all(resting)
    # The user's modules run for an answer.
    assert all(asked)
    assert gc.isenabled()


def test_a_workspace_that_is_known_stays() -> None:
    trace, _ = traced(flat)
    known = replace(trace, ops=tuple(replace(op, workspace_bytes=5) for op in trace.ops))
    assert with_workspaces(known, 2.0) == known


class Sequences(nn.Module):
    """Layers that do the same on one sequence, then another kind of layers."""

    def __init__(self, layers: int, frozen: bool) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.layers = nn.ModuleList(self.layer(512) for _ in range(layers))
        self.others = nn.ModuleList(self.layer(128) for _ in range(2))
        for parameter in (*self.layers.parameters(), *self.others.parameters()):
            parameter.requires_grad_(not frozen)

    def layer(self, wide: int) -> nn.Module:
        return nn.Sequential(nn.Linear(64, wide), nn.GELU(), nn.Linear(wide, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in (*self.layers, *self.others):
            x = x + layer(x)
        return x


def search(layers: int, frozen: bool, asked: list[Section]) -> Sectioning:
    model, call = Sequences(layers, frozen), ((torch.randn(1, 4096, 64),), {})
    seen = [static_trace_with_batch(model, call, torch.device("cpu"), it) for it in (0, 1)]
    storages = tuple(replace(storage, device="cuda") for storage in seen[0].storages)
    trace = replace(seen[0], device="cuda", storages=storages)
    chains = [(name,) for name, _ in model.named_modules() if name.count(".") == 1]

    def may(section: Section) -> bool:
        asked.append(section)
        return True

    def dims(along: int) -> Dims:
        assert along == 1
        return [op.batch_dims for op in seen[1].ops]

    return Sectioning(trace, Least(gpu(), PLENTY), chains, may, dims)


@pytest.mark.parametrize("frozen", [False, True])
def test_layers_that_do_the_same_are_cut_alike_along_their_tokens(frozen: bool) -> None:
    asked: list[Section] = []
    sectioning = search(24, frozen, asked)
    whole, _ = sectioning._needed(())
    found = sectioning._found(len, int(0.75 * whole))
    assert found is not None
    assert {it.modules[0].split(".")[0] for it in found} == {"layers"}
    assert sorted(int(it.modules[0].split(".")[1]) for it in found) == list(range(24))
    assert {it.along for it in found} == {1}
    # Cut finer where it takes that, and not one layer after another.
    assert {it.slices for it in found} <= {2, 4}
    assert len(asked) == 24
    assert len(sectioning._known) < 24
    assert sectioning.within(int(0.75 * whole)) is not None


def test_no_more_layers_are_cut_than_it_takes() -> None:
    sectioning = search(8, False, [])
    whole, at = sectioning._needed(())
    one = (Section((at.rpartition(".")[0],), 2, along=1),)
    without, next_at = sectioning._needed(one)
    assert without < whole
    assert next_at.rpartition(".")[0] != at.rpartition(".")[0]
    assert sectioning.within(without) == one


def test_what_may_not_be_cut_leaves_those_like_it_to_the_search() -> None:
    sectioning = search(4, False, [])
    whole, _ = sectioning._needed(())
    sectioning._may = lambda section: section.modules != ("layers.2",)
    assert sectioning.within(int(0.6 * whole)) is None


def test_of_few_samples_tokens_are_cut_and_of_enough_they_are_not() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 512), nn.GELU())
    model.append(nn.Linear(512, 64))
    for samples, along in ((2, 1), (64, 0)):
        call = ((torch.randn(samples, 65536 // samples, 64),), {})
        seen = [static_trace_with_batch(model, call, torch.device("cpu"), it) for it in (0, 1)]
        storages = tuple(replace(storage, device="cuda") for storage in seen[0].storages)
        trace = replace(seen[0], device="cuda", storages=storages)
        dims = [op.batch_dims for op in seen[1].ops]
        chain = tuple(str(number) for number in range(5))
        sectioning = Sectioning(
            trace, Least(gpu(), PLENTY), [chain], everything, lambda _, it=dims: it
        )
        found = sectioning.within(int(0.35 * sectioning._needed(())[0]))
        assert found
        assert {it.along for it in found} == {along}


def test_where_tokens_are_not_known_nothing_is_cut_along_them() -> None:
    sectioning = search(2, False, [])
    sectioning._dims = lambda _: None
    assert sectioning.within(sectioning._needed(())[0] // 2) is None


@pytest.mark.parametrize("slices", [1, 4])
def test_what_the_floor_holds_is_what_its_plan_needs(slices: int) -> None:
    trace, chains = traced(flat)
    search = Sectioning(trace, Least(gpu(), PLENTY), chains, everything)
    sections = (Section(chains[0][:5], slices),) if slices > 1 else ()
    under, held = search.floor(sections)
    assert under == (apply(trace, sections) if sections else trace)
    assert len(held) == len(under.ops)
    # Nothing is lost between blocks of this machine.
    assert max(held) == floor_of(trace, sections)


def test_sections_fit_in_what_they_need() -> None:
    trace, chains = traced(flat)
    sections = (Section(chains[0][:5], 4),)
    needed = floor_of(trace, sections)
    search = Sectioning(trace, Least(gpu(), PLENTY), chains, everything)
    assert search.fits(sections, needed)
    assert not search.fits(sections, needed - 1)
    assert search.allows(sections)
    assert not Sectioning(trace, Least(gpu(), PLENTY), chains, lambda _: False).allows(sections)
