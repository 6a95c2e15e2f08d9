from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from belady.ir.hardware import Allocator
from belady.ir.plan import Budget
from belady.ir.sections import apply
from belady.ir.trace import Phase
from belady.measure.batch import static_trace_with_batch
from belady.measure.held import trained_bytes, with_state
from belady.measure.stages import Policy
from belady.planners import smallest_budget
from belady.planners.least import Least
from belady.planners.sectioning import over_budget
from belady.planners.workspace import with_workspaces
from belady.sections import candidate, choice, searching
from belady.sections.cutting import Cutting
from belady.sections.workspaces import workspace_share
from belady.units import format_bytes
from tests.unit.planners.nets import gpu

CPU = torch.device("cpu")


def deep() -> nn.Sequential:
    layers = (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()), *layers)


def heavy(width: int = 4096) -> nn.Sequential:
    head = nn.Flatten(), nn.Linear(512, width), nn.Linear(width, 8)
    return nn.Sequential(deep(), nn.AdaptiveAvgPool2d(8), *head)


KEY = (0,)
CALL = ((torch.rand(32, 3, 32, 32),), {})


def floor(model: nn.Module) -> int:
    trace = static_trace_with_batch(model, CALL, CPU)
    return smallest_budget("floor", trace, gpu(), Budget(1 << 40))


def counts(parts: Cutting) -> list[int]:
    return [int(number) for said in parts.said for number in re.findall(r"in (\d+) slices", said)]


def slices(budget: int) -> list[int]:
    model = deep()
    parts = Cutting(Policy("auto", Budget(budget)), gpu(), CPU)
    assert parts.cut(KEY, model, CALL)
    assert model in parts
    parts.close()
    return counts(parts)


def test_slices_leave_room_for_what_a_plan_keeps_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = int(0.95 * floor(deep()))
    roomy = slices(budget)
    monkeypatch.setattr(choice, "ROOM", (1.0,))
    assert max(roomy) > max(slices(budget))


def test_where_there_is_no_such_room_what_fits_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "ROOM", (0.01, 1.0))
    assert slices(int(0.95 * floor(deep())))


def test_nothing_that_cannot_be_helped_is_cut() -> None:
    assert not Cutting(Policy("auto", Budget(1 << 10)), gpu(), CPU).cut(KEY, deep(), CALL)


def test_whoever_waits_for_the_search_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "belady")
    for nbytes, found in ((int(0.95 * floor(deep())), "found slices"), (1 << 10, "found none")):
        caplog.clear()
        Cutting(Policy("auto", Budget(nbytes)), gpu(), CPU).cut(KEY, deep(), CALL)
        first, *_, last = (it.getMessage() for it in caplog.records)
        assert first.startswith("looking for slices in which a call of ")
        assert first.endswith(f" fits into {format_bytes(nbytes)}")
        assert last.startswith(f"{found} in ")


@pytest.mark.parametrize(
    "policy", [Policy("auto", Budget(1 << 20), exact=True), Policy("lifetime", Budget(1 << 20))]
)
def test_who_must_not_or_does_not_cut(policy: Policy) -> None:
    assert not Cutting(policy, gpu(), CPU).cut(KEY, deep(), CALL)


def test_what_does_not_fit_when_it_is_tried_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(candidate, "trial", scarce)
    parts = Cutting(Policy("auto", Budget(int(0.95 * floor(deep())))), gpu(), CPU)
    assert not parts.cut(KEY, deep(), CALL)
    assert parts.said == []
    (why,) = parts.refused
    assert "do not fit beside what is held" in why


@pytest.mark.parametrize(("share", "cut"), [(0.0, False), (1.0, True)])
def test_room_is_made_beside_workspaces_where_they_would_not_fit(
    share: float, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "workspace_share", lambda *_: share)
    model = deep()
    trace = static_trace_with_batch(model, CALL, CPU)
    parts = Cutting(Policy("auto", Budget(int(1.1 * floor(model)))), gpu(), CPU)
    parts.make_room(KEY, model, CALL, trace)
    assert (model in parts) == cut
    roomy = Cutting(Policy("auto", Budget(10 * floor(deep()))), gpu(), CPU)
    roomy.make_room(KEY, deep(), CALL, trace)
    assert roomy.said == []


def test_room_for_workspaces_is_what_an_optimizer_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "workspace_share", lambda *_: 1.0)
    model = deep()
    trace = static_trace_with_batch(model, CALL, CPU)
    least = over_budget(with_workspaces(trace, 1.0), Least(gpu(), Budget(0)))
    enough = least + trained_bytes(trace)
    for nbytes, lacks in ((least, True), (enough - 1, True), (enough, False)):
        parts = Cutting(Policy("auto", Budget(nbytes)), gpu(), CPU)
        assert parts.lacks_workspaces(model, CALL, trace) is lacks


def test_slices_leave_room_for_what_an_optimizer_is_going_to_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(searching, "workspace_share", lambda *_: 1.0)
    heads = nn.Flatten(), nn.Linear(512, 4096), nn.Linear(4096, 8)
    model = nn.Sequential(deep(), nn.AdaptiveAvgPool2d(8), *heads)
    trace = static_trace_with_batch(model, CALL, CPU)
    state = trained_bytes(trace)
    asking = with_workspaces(trace, 1.0)
    nbytes = over_budget(asking, Least(gpu(), Budget(0))) + int(0.9 * state)
    assert state > 0.25 * nbytes  # more than what slices leave anyway
    parts = Cutting(Policy("auto", Budget(nbytes)), gpu(), CPU)
    parts.make_room(KEY, model, CALL, trace)
    assert model in parts
    sections = parts._known[model][KEY].sections
    assert over_budget(apply(asking, sections), Least(gpu(), Budget(nbytes - state))) <= 0


def test_for_workspaces_alone_a_call_is_cut_into_few_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(searching, "workspace_share", lambda *_: 1.0)
    budget, most = Budget(int(1.1 * floor(deep()))), 1 << 20
    for less, cut in ((0, True), (0, True), (1, False)):
        monkeypatch.setattr(choice, "_FEW", most - less)
        model = deep()
        parts = Cutting(Policy("auto", budget), gpu(), CPU)
        parts.make_room(KEY, model, CALL, static_trace_with_batch(model, CALL, CPU))
        assert (model in parts) is cut
        most = max(counts(parts)) if cut else most
    # What does not fit whole is cut into as many as it takes.
    monkeypatch.setattr(choice, "_FEW", 1)
    parts = Cutting(Policy("auto", Budget(int(0.95 * floor(deep())))), gpu(), CPU)
    assert parts.cut(KEY, deep(), CALL)


def test_for_workspaces_slices_leave_room_for_momentum_or_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []

    def chosen(_self: object, _searches: object, _trace: object, copies: object, _: object) -> None:
        asked.append(copies)

    monkeypatch.setattr(searching, "workspace_share", lambda *_: 1.0)
    monkeypatch.setattr(choice.Beside, "chosen", chosen)
    model = deep()
    parts = Cutting(Policy("auto", Budget(int(1.1 * floor(model)))), gpu(), CPU)
    parts.make_room(KEY, model, CALL, static_trace_with_batch(model, CALL, CPU))
    assert asked == [(1,)]


@pytest.mark.parametrize(("policy", "cut"), [("auto", True), ("tvdnn_greedy", False)])
def test_no_margin_is_asked_on_what_stays_where_there_are_no_slices_with_it(
    policy: str, cut: bool
) -> None:
    machine = replace(gpu(), allocator=Allocator(1, 0.5, 0))
    trace = static_trace_with_batch(heavy(), CALL, CPU)
    whole = smallest_budget("floor", trace, machine, Budget(1 << 40))
    parts = Cutting(Policy(policy, Budget(int(0.85 * whole))), machine, CPU)
    # Policies that do as their papers say ask for a margin on everything.
    assert parts.cut(KEY, heavy(), CALL) is cut


def test_what_is_held_already_leaves_less_room() -> None:
    budget = int(0.95 * floor(deep()))
    found = []
    for held in (0, budget // 4):
        model = deep()
        parts = Cutting(Policy("auto", Budget(budget)), gpu(), CPU)
        parts.begin(KEY, model)
        parts.held_bytes = held
        assert parts.cut(KEY, model, CALL)
        found.append(max(counts(parts)))
    assert found[0] < found[1]


@pytest.mark.parametrize(("convolves", "lacks"), [(True, True), (False, False)])
def test_only_convolutions_lack_workspaces(
    convolves: bool, lacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "workspace_share", lambda *_: 2.0)
    model = deep() if convolves else nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    trace = static_trace_with_batch(model, CALL, CPU)
    # Below the floor, where a plan may fit that recomputes.
    parts = Cutting(Policy("auto", Budget(int(0.9 * floor(model)))), gpu(), CPU)
    assert parts.lacks_workspaces(model, CALL, trace) is lacks


@pytest.mark.parametrize(
    ("dtype", "weights_last", "images_last", "share"),
    [
        (torch.bfloat16, False, False, 1.0),
        (torch.bfloat16, True, False, 0.0),
        (torch.bfloat16, False, True, 0.0),
        (torch.float32, False, False, 3.15),
        (torch.float32, True, True, 4.15),
    ],
)
def test_the_workspace_that_may_be_asked_for_is_that_of_the_format(
    dtype: torch.dtype,
    weights_last: bool,
    images_last: bool,
    share: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    formats = torch.contiguous_format, torch.channels_last
    model = torch.nn.Conv2d(3, 4, 3).to(dtype, memory_format=formats[weights_last])
    images = torch.empty(2, 3, 8, 8, dtype=dtype).to(memory_format=formats[images_last])
    asked = workspace_share(model, ((images,), {}), torch.device("cuda"))
    assert asked == share
    assert workspace_share(model, ((images,), {}), CPU) == 0.0


def test_what_needs_more_than_foretold_is_cut_finer() -> None:
    model = deep()
    parts = Cutting(Policy("auto", Budget(int(0.9 * floor(model)))), gpu(), CPU)
    assert parts.cut(KEY, model, CALL)
    coarse = parts.said
    observed = with_workspaces(static_trace_with_batch(deep(), CALL, CPU), 0.5)
    assert parts.unsuited(model, observed)
    assert model not in parts
    assert parts.said == []
    assert parts.cut(KEY, model, CALL)
    assert parts.said not in ([], coarse)
    # Not for ever: at last a policy has to make do.
    assert parts.unsuited(model, observed)
    assert parts.cut(KEY, model, CALL)
    assert not parts.unsuited(model, observed)


@pytest.mark.parametrize(
    ("copies", "steps", "coarser"), [(1, True, True), (2, True, False), (0, False, False)]
)
def test_slices_leave_no_room_for_state_that_an_optimizer_does_not_keep(
    copies: int, steps: bool, coarser: bool
) -> None:
    model = heavy(256)
    small = static_trace_with_batch(heavy(256), ((torch.rand(2, 3, 32, 32),), {}), CPU)
    budget = floor(model) + trained_bytes(small) // 5
    parts = Cutting(Policy("auto", Budget(budget)), gpu(), CPU)
    assert parts.cut(KEY, model, CALL)
    before = counts(parts)
    last = replace(small.ops[-1], phase=Phase.OPTIMIZER if steps else Phase.BACKWARD)
    observed = with_state(replace(small, ops=(*small.ops[:-1], last)), copies)
    assert parts.unsuited(model, observed) is coarser
    assert (model in parts) is not coarser
    parts.begin(KEY, model)
    assert parts.cut(KEY, model, CALL)
    assert (sum(counts(parts)) < sum(before)) is coarser
    # Once is enough, and what is too coarse then is cut finer as often as ever.
    assert not parts.unsuited(model, observed)
    large = with_workspaces(static_trace_with_batch(heavy(256), CALL, CPU), 2.0)
    for _ in range(2):
        assert parts.unsuited(model, large)
        parts.begin(KEY, model)
        assert parts.cut(KEY, model, CALL)


def test_what_fits_as_foretold_or_is_not_cut_stays_as_it_is() -> None:
    model = deep()
    trace = static_trace_with_batch(model, CALL, CPU)
    parts = Cutting(Policy("auto", Budget(int(0.9 * floor(model)))), gpu(), CPU)
    assert not parts.unsuited(model, trace)
    assert parts.cut(KEY, model, CALL)
    small = static_trace_with_batch(deep(), ((torch.rand(2, 3, 32, 32),), {}), CPU)
    assert not parts.unsuited(model, small)
    assert model in parts
