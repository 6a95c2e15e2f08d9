"""Captured graphs that no plan can hold: `auto` captures modules of them in slices."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import belady
from belady.errors import InfeasibleBudgetError
from belady.graph.session import Session
from belady.ir.plan import Section
from belady.ir.run import Run
from belady.ir.trace import Source, Tier
from belady.measure.restraint import Restrained
from belady.sections import searching
from belady.sections.choice import Beside, Chosen
from belady.sections.cutting import Cutting
from tests.parity.test_cutting import MIB, Wide, images, perceptron, precise_images, sequences
from tests.parity.test_cutting import Feedforward as Perceiving
from tests.support import training as steps
from tests.support.models import Task
from tests.support.training import (
    Step,
    Training,
    accumulating,
    differences,
    footprint,
    plain,
)

ITERATIONS = range(5)

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Norms(nn.Module):
    """No bias before a norm: its gradient would be rounding, of which AdamW makes a step."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels in (3, 16):
            layers += [nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)]
            layers += [nn.ReLU(inplace=True), nn.MaxPool2d(4)]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1))


class Block(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(8, 16, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(16) if norm else nn.Identity()
        self.conv2 = nn.Conv2d(16, 8, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(8) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return torch.relu(self.norm2(self.conv2(y)) + x)


class Residual(nn.Module):
    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(Block(norm) for _ in range(2))
        self.head = nn.Linear(8 * 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(F.max_pool2d(x, 8).flatten(1))


def precise_sequences(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    numbers, labels = sequences(size, generator)
    return numbers.double(), labels


WIDE = Task("like a VGG", lambda: [Wide().double()], precise_images)
CHAIN = Task(
    "a root that is cut itself",
    lambda: [nn.Sequential(*Wide().features, nn.Flatten(1), nn.Linear(256, 10)).double()],
    precise_images,
)
DROPPING = Task("with dropout", lambda: [Wide(nn.Dropout(0.2)).double()], precise_images)
NORMS = Task("with batch norms", lambda: [Norms().double()], precise_images)
BLOCKS = Task("with blocks", lambda: [Residual(norm=False).double()], precise_images)
RESNET = Task("blocks with norms", lambda: [Residual(norm=True).double()], precise_images)
TOKENS = Task("tokens", lambda: [Perceiving(perceptron()).double()], precise_sequences)
# How much of what the floor needs is enough, in slices: less helps where no norm is a barrier.
ENOUGH = {WIDE: 0.4, CHAIN: 0.5, DROPPING: 0.6, NORMS: 0.8, BLOCKS: 0.4, RESNET: 0.85, TOKENS: 0.6}


@functools.cache
def needed(of: Task, engine: str = "graph") -> int:
    """Smallest budget that a refusal of whole modules names."""
    training = Training(of)
    vm = belady.virtualize(training.models, MIB // 4, policy="floor", engine=engine)
    with vm, pytest.raises(InfeasibleBudgetError) as caught:
        training.loss(0)
    return caught.value.smallest_bytes


def enough(of: Task) -> int:
    return int(needed(of) * ENOUGH[of])


def trained(
    of: Task,
    step: Step = plain,
    iterations: range = ITERATIONS,
    engine: str = "graph",
    times: float = 1.0,
) -> tuple[Training, Run]:
    training, budget = Training(of), int(enough(of) * times)
    with belady.virtualize(training.models, budget, engine=engine) as vm:
        training.run(step, iterations)
        run = vm.run()
        assert re.search(r"runs? in \d+ slices", vm.report())
    assert run is not None
    assert run.trace.source is Source.GRAPH
    assert run.measured is not None
    assert run.measured.peak(Tier.DEVICE) <= budget
    assert "sections" in run.plan.numerics
    assert vm.verified
    return training, run


def assert_near(expected: Training, actual: Training) -> None:
    """Losses and the last gradients: AdamW's steps of gradients near zero are another matter."""
    for one, two in zip(expected.losses, actual.losses, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
    wanted, found = expected.outcome(), actual.outcome()
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        other = found[name]
        if tensor.is_floating_point():
            torch.testing.assert_close(other, tensor, rtol=1e-9, atol=1e-9, msg=name)
        else:
            assert torch.equal(tensor, other), name


@pytest.mark.parametrize("of", ENOUGH, ids=str)
def test_a_budget_that_is_refused_without_slices_trains_in_them(of: Task) -> None:
    training, run = trained(of)
    assert_near(Training(of).run(plain, ITERATIONS), training)
    assert run.plan.numerics == ("sections",)
    assert not [note for note in run.notes if "not captured" in note]


@pytest.mark.parametrize(("share", "cut"), [(0.0, False), (1.0, True)])
def test_what_fits_but_for_workspaces_trains_in_slices(
    share: float, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "workspace_share", lambda *_: share)
    searched = noted(monkeypatch)
    training, run = Training(WIDE), None
    with belady.virtualize(training.models, int(needed(WIDE) * 1.2), engine="graph") as vm:
        training.run(plain, ITERATIONS)
        run = vm.run()
    assert run is not None
    assert ("sections" in run.plan.numerics) is cut
    # Once, for the kind of call that there is.
    assert len(searched) == cut
    assert_near(Training(WIDE).run(plain, ITERATIONS), training)


class Counting(nn.Module):
    """Something runs before the first graph, and goes on where what follows has failed."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls, self.failed = Wide(), 0, 0

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def count(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.count(x)
        try:
            return self.body(x)
        except Exception:
            self.failed += 1
            raise


def zeroing(training: Training, index: int) -> list[Tensor]:
    """As `plain`, but that gradients stay where they are: later calls have some."""
    loss = training.loss(index)
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=False)
    return [loss]


@pytest.mark.parametrize("step", [plain, zeroing])
def test_what_runs_before_a_graph_that_lacks_workspaces_runs_once(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "workspace_share", lambda *_: 1.0)
    searched = noted(monkeypatch)
    task = Task("counting", lambda: [Counting().double()], precise_images)
    training = Training(task)
    with belady.virtualize(training.models, int(needed(WIDE) * 1.2), engine="graph"):
        training.run(step, ITERATIONS)
    (model,) = training.models
    assert len(searched) == 1
    assert (model.calls, model.failed) == (len(ITERATIONS), 0)
    assert_near(Training(task).run(step, ITERATIONS), training)


def noted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What slices were looked for, for the sake of workspaces."""
    found, search = list[object](), Cutting.cut_for_workspaces

    def note(self: Cutting, *given: Any) -> bool:
        found.append(given)
        return search(self, *given)

    monkeypatch.setattr(Cutting, "cut_for_workspaces", note)
    return found


def test_where_no_slices_make_room_for_workspaces_it_trains_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(searching, "workspace_share", lambda *_: 1.0)
    monkeypatch.setattr(Beside, "chosen", lambda *_: None)
    searched = noted(monkeypatch)
    training = Training(WIDE)
    with belady.virtualize(training.models, int(needed(WIDE) * 1.2), engine="graph") as vm:
        training.run(steps.evaluating, ITERATIONS)
        run = vm.run()
    assert run is not None
    assert run.plan.numerics == ()
    # In training alone: in eval mode there is room.
    assert len(searched) == 1
    expected = Training(WIDE).run(steps.evaluating, ITERATIONS)
    assert differences(expected.outcome(), training.outcome()) == []


@pytest.mark.parametrize("leaves", [0, 5])
def test_watched_convolutions_leave_what_those_left_that_were_raced(
    leaves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = list[int]()

    def keep_back(_: torch.device, owner: object, nbytes: int) -> None:
        kept.append(nbytes)

    monkeypatch.setattr(Restrained.__init__, "__defaults__", (keep_back,))
    monkeypatch.setattr(Cutting, "leaves_bytes", lambda *_: leaves)
    training, run = trained(WIDE)
    assert_near(Training(WIDE).run(plain, ITERATIONS), training)
    # Forward and backward of each, in two iterations that are watched; not in those after them.
    count = sum("convolution" in op.name for op in run.trace.ops)
    assert kept == (2 * count * [leaves, 0] if leaves else [])


@pytest.mark.parametrize("of", [WIDE, NORMS], ids=str)
@pytest.mark.parametrize("step", [accumulating, steps.short_at_the_end, steps.evaluating])
def test_habits_of_training_give_the_numbers_of_the_whole_batch(step: Step, of: Task) -> None:
    training, budget = Training(of), int(enough(of) * 1.1)
    with belady.virtualize(training.models, budget, engine="graph") as vm:
        training.run(step, ITERATIONS)
        assert re.search(r"runs? in \d+ slices", vm.report())
    assert_near(Training(of).run(step, ITERATIONS), training)


def test_under_autocast() -> None:
    def step(training: Training, index: int) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = training.loss(index, 16)
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        return [loss]

    of = Task("under autocast", lambda: [Wide()], images)
    training = Training(of)
    with belady.virtualize(training.models, int(needed(of) * 0.7), engine="graph") as vm:
        training.run(step, ITERATIONS)
        run = vm.run()
    assert run is not None
    assert [note for note in run.notes if "not captured" in note] == []
    assert "sections" in run.plan.numerics
    for one, two in zip(Training(of).run(step, ITERATIONS).losses, training.losses, strict=True):
        torch.testing.assert_close(one, two, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("engine", "of", "times"),
    # In few slices: Inductor takes seconds to compile each segment of them.
    [("auto", WIDE, 1.0), ("inductor", WIDE, 1.5), ("inductor", NORMS, 1.15)],
    ids=str,
)
def test_what_is_captured_as_a_whole_still_is(engine: str, of: Task, times: float) -> None:
    training, _ = trained(of, engine=engine, times=times)
    assert_near(Training(of).run(plain, ITERATIONS), training)


def session_of(vm: belady.VirtualMemory) -> Session:
    session = vm._tracker.conductor
    assert isinstance(session, Session)
    return session


def test_everything_is_undone_and_can_be_done_again() -> None:
    budget, training = enough(WIDE), Training(WIDE)
    expected = Training(WIDE).run(plain, range(6))
    modules = list(training.model.modules())
    before = footprint([*modules, training.optimizer]), [set(vars(it)) for it in modules]
    for at in (0, 3):
        with belady.virtualize(training.models, budget, engine="graph") as vm:
            training.run(plain, range(at, at + 3))
            assert session_of(vm).admission.said
            inside = [set(vars(it)) for it in modules]
            assert inside[1:] == before[1][1:]
            other = copy.deepcopy(training.model)
        assert [set(vars(it)) for it in modules] == before[1]
        assert other.state_dict().keys() == training.model.state_dict().keys()
        if not at:
            assert footprint([*modules, training.optimizer]) == before[0]
    assert_near(expected, training)


def test_an_error_in_the_middle_leaves_nothing_behind() -> None:
    budget, training = enough(WIDE), Training(WIDE)
    with belady.virtualize(training.models, budget, engine="graph"):
        training.run(plain, range(2))
        with pytest.raises((RuntimeError, TypeError)):
            training.model(torch.randn(8, 5, 64, 64, dtype=torch.float64))
        assert all("forward" not in vars(it) for it in list(training.model.modules())[1:])
        training.run(plain, range(2, 5))
    assert all("forward" not in vars(it) for it in training.model.modules())
    assert_near(Training(WIDE).run(plain, ITERATIONS), training)


@pytest.mark.parametrize(("policy", "exact"), [("hybrid", False), ("auto", True)])
def test_nobody_else_cuts(policy: str, exact: bool) -> None:
    training = Training(WIDE)
    vm = belady.virtualize(
        training.models, enough(WIDE), policy=policy, exact=exact, engine="graph"
    )
    with vm, pytest.raises(InfeasibleBudgetError):
        training.run(plain, ITERATIONS)
    assert training.losses == []


def test_a_refusal_says_why_modules_are_not_in_slices() -> None:
    training = Training(WIDE)
    training.model.get_submodule("features.0").register_forward_hook(lambda *_: None)
    vm = belady.virtualize(training.models, enough(WIDE), engine="graph")
    with vm, pytest.raises(InfeasibleBudgetError) as caught:
        training.loss(0)
    assert any("has hooks" in note for note in caught.value.__notes__)
    assert caught.value.smallest_bytes > enough(WIDE)


class Broken(Wide):
    """It is captured in two graphs."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        torch._dynamo.graph_break()
        return self.head(x.flatten(1))


def test_a_part_of_a_model_runs_in_slices() -> None:
    of = Task("in parts", lambda: [Broken().double()], precise_images)
    training = Training(of)
    with belady.virtualize(training.models, int(needed(WIDE) * 0.6), engine="graph") as vm:
        training.run(plain, ITERATIONS)
        run = vm.run()
    assert run is not None
    assert run.plan.numerics == ("sections",)
    assert len([root for root in run.trace.roots if root == "Broken"]) == 2
    assert_near(Training(of).run(plain, ITERATIONS), training)


class Late(nn.Module):
    """The second of its graphs needs more than the first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.rest = Wide()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        torch._dynamo.graph_break()
        return self.rest(x)


def test_what_has_begun_is_not_run_again() -> None:
    training = Training(Task("late", lambda: [Late().double()], precise_images))
    vm = belady.virtualize(training.models, int(needed(WIDE) * 0.6), engine="graph")
    with vm, pytest.raises(InfeasibleBudgetError) as caught:
        training.loss(0)
    assert any("had run" in note for note in caught.value.__notes__)
    assert training.model.get_buffer("norm.num_batches_tracked") == 1


def test_kinds_of_calls_have_sections_of_their_own() -> None:
    training = Training(WIDE)
    expected = Training(WIDE)
    with belady.virtualize(training.models, enough(WIDE), engine="graph") as vm:
        for index in range(4):
            for size in (8, 2):
                for it in (training, expected):
                    it.losses.append(it.loss(index, size))
                    it.losses[-1].backward()
                    it.optimizer.step()
                    it.optimizer.zero_grad()
        kinds = session_of(vm)._kinds
        planned = [kind for kind in kinds.values() if kind.force is not None]
        assert sorted(any(graph.sliced for graph in it.graphs) for it in planned) == [False, True]
    assert_near(expected, training)


class Narrow(nn.Module):
    """Slices help with what its convolutions make, and not with the gradients of what follows."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels in (3, 16):
            layers += [nn.Conv2d(channels, 16, 3, 2, 1), nn.ReLU(inplace=True)]
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(1))
        self.head = nn.Sequential(nn.Linear(16, 2000), nn.ReLU(), nn.Linear(2000, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


NARROW = Task("narrow", lambda: [Narrow().double()], precise_images)


def two_views(training: Training, index: int) -> list[Tensor]:
    """The model is called twice in an iteration: each graph fits that the two do not fit in."""
    x, labels = training.batch(index)
    loss = sum(training.task.loss(training.model(it), labels) for it in (x, x.flip(-1)))
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return [loss]


@pytest.mark.parametrize("engine", ["graph", "auto"])
def test_an_iteration_that_no_slices_help_is_refused(engine: str) -> None:
    training, budget = Training(NARROW), needed(NARROW) // 2
    with belady.virtualize(training.models, budget, engine=engine) as vm:
        with pytest.raises(InfeasibleBudgetError) as caught:
            training.run(two_views, range(10))
        assert vm.run() is None
        assert re.search(r"runs? in \d+ slices", vm.report())
    # They show what they lack together when they were observed.
    assert len(training.losses) == 2
    assert any("in slices already" in note for note in caught.value.__notes__)
    smallest = caught.value.smallest_bytes
    assert budget < smallest < needed(NARROW)
    training = Training(NARROW)
    with belady.virtualize(training.models, smallest, engine=engine) as vm:
        training.run(two_views, range(6))
        assert vm.verified
    assert_near(Training(NARROW).run(two_views, range(6)), training)


def test_an_iteration_that_finer_slices_help_trains_in_them() -> None:
    training, budget = Training(NARROW), int(needed(NARROW) * 0.6)
    cut = list[object]()
    with belady.virtualize(training.models, budget, engine="graph") as vm:
        for index in range(8):
            training.run(two_views, [index])
            cut.append(session_of(vm).admission.in_force(training.model))
        assert vm.verified
    # Others from the third iteration on, when two were observed.
    assert [cut.index(it) for it in cut] == [0, 0, 2, 2, 2, 2, 2, 2]
    assert_near(Training(NARROW).run(two_views, range(8)), training)


def test_what_does_not_do_in_the_graph_is_cut_finer(monkeypatch: pytest.MonkeyPatch) -> None:
    coarse = iter([Chosen((Section(("features.0", "features.1"), 2),), 0)])
    chosen = Beside.chosen
    monkeypatch.setattr(Beside, "chosen", lambda *given: next(coarse, None) or chosen(*given))
    training, _ = trained(WIDE)
    assert list(coarse) == []
    assert_near(Training(WIDE).run(plain, ITERATIONS), training)
