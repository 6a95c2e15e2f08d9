"""`virtualize(engine="graph")` is put on and taken off models that go on being what they were."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import belady
from belady.graph.session import Session
from belady.ir.trace import Source
from belady.measure.calls import compiled_anything, frames_compiled
from belady.virtual import IterationStats, VirtualMemory
from tests.support.models import CNN, LSTM, Task
from tests.support.training import Training, differences, footprint, plain, short_at_the_end

ROOM = 1 << 30

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def within(model: nn.Module, policy: str = "floor") -> VirtualMemory:
    return belady.virtualize(model, ROOM, policy=policy, engine="graph")


def session_of(vm: VirtualMemory) -> Session:
    session = vm._tracker.conductor
    assert isinstance(session, Session)
    return session


def test_close_leaves_everything_as_it_was() -> None:
    expected, training = Training(CNN).run(plain, range(6)), Training(CNN)
    modules = list(training.model.modules())
    before = footprint([*modules, training.optimizer]), [set(vars(it)) for it in modules]
    with within(training.model):
        training.run(plain, range(4))
    assert (footprint([*modules, training.optimizer]), [set(vars(it)) for it in modules]) == before
    training.run(plain, range(4, 6))
    assert differences(expected.outcome(), training.outcome()) == []


def test_one_that_is_dropped_leaves_the_model_to_plain_pytorch() -> None:
    expected, training = Training(CNN).run(plain, range(6)), Training(CNN)
    vm = within(training.model)
    training.run(plain, range(4))
    held = weakref.ref(vm)
    del vm
    gc.collect()
    assert held() is None
    training.run(plain, range(4, 6))
    assert differences(expected.outcome(), training.outcome()) == []


def test_a_copy_of_the_model_is_not_managed() -> None:
    model = Training(CNN).model
    with within(model) as vm:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert list(other.state_dict()) == list(model.state_dict())
            other(torch.randn(2, 3, 16, 16)).sum().backward()
        assert vm._tracker.conductor is None


def test_calls_without_gradients_are_not_captured() -> None:
    model = Training(CNN).model
    with within(model) as vm:
        with torch.no_grad():
            model(torch.randn(2, 3, 16, 16))
        assert vm._tracker.conductor is None


def test_listeners_hear_of_every_iteration() -> None:
    training, heard = Training(CNN), list[IterationStats]()
    with within(training.model) as vm:
        vm.listeners.append(heard.append)
        training.run(plain, range(6))
    assert [it.index for it in heard] == list(range(1, 7))
    assert [it.phase for it in heard] == [
        "warm-up", "observed", "first planned", "verified", "verified", "steady",
    ]  # fmt: skip
    assert all(it.seconds > 0 for it in heard)


def test_an_iteration_can_be_recorded() -> None:
    training = Training(CNN)
    with within(training.model) as vm:
        vm.record()
        training.run(plain, range(7))
        assert vm.verified is True
    run = vm.run()
    assert run is not None
    assert run.measured is not None
    assert run.measured.level == 2
    assert run.measured.spans
    assert "It fits" in vm.report()
    assert "in the iteration before those, of captured graphs alone." in vm.report()


class Talking(nn.Module):
    """Dynamo cannot capture what it prints."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        print("half of it")
        return self.second(x)


def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 64, generator=generator)
    return x, torch.randint(10, (size,), generator=generator)


def test_the_report_says_where_a_graph_breaks() -> None:
    task = Task("talking", lambda: [Talking()], batch)
    expected, training = Training(task).run(plain, range(5)), Training(task)
    with within(training.model) as vm:
        training.run(plain, range(5))
    assert differences(expected.outcome(), training.outcome()) == []
    line = Talking.forward.__code__.co_firstlineno + 2
    (note,) = session_of(vm).said
    assert note.startswith("not captured, and so not managed: ")
    assert note.endswith(f"{__file__}:{line}")
    assert note in vm.report()


def test_the_report_says_when_nothing_was_captured() -> None:
    training = Training(LSTM)
    with within(training.model) as vm:
        training.run(plain, range(2))
    assert vm.run() is None
    assert "no iteration has been planned yet" in vm.report()
    assert "LSTM" in vm.report()


def test_the_report_says_that_a_call_was_watched_by_somebody_else() -> None:
    training = Training(CNN)
    with within(training.model) as vm:
        training.run(plain, range(5))
        with FlopCounterMode(display=False):
            training.run(plain, [5])
    run = vm.run()
    assert run is not None
    assert "under a dispatch mode" in run.notes[0]


def test_the_report_names_a_root_inside_somebody_elses_compile() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    x = torch.ones(1, 2)
    with belady.virtualize([model, model[0]], ROOM, policy="floor", engine="graph") as vm:
        step = torch.compile(lambda x: model(x).sum(), backend="eager", fullgraph=True)
        step(x).backward()
        said = [f"{name} is called inside what torch.compile" for name in ("Sequential", "Linear")]
        assert all(it in vm.report() for it in said)
        for _ in range(4):
            model(x).sum().backward()
        run = vm.run()
    assert run is not None
    assert all(any(it in note for note in run.notes) for it in said)


def test_a_root_inside_another_is_part_of_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with belady.virtualize([model, model[0]], ROOM, policy="floor", engine="graph") as vm:
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
        run = vm.run()
    assert run is not None
    assert run.notes == ()


def test_the_report_says_why_the_very_first_call_was_not_captured() -> None:
    model = nn.Linear(2, 2)
    with within(model) as vm, FlopCounterMode(display=False):
        model(torch.ones(1, 2))
        assert "under a dispatch mode" in vm.report()


@pytest.mark.parametrize("task", [CNN, LSTM, Task("talking", lambda: [Talking()], batch)], ids=str)
def test_auto_captures_what_can_be_captured_as_a_whole(task: Task) -> None:
    expected, training = Training(task).run(plain, range(6)), Training(task)
    before = footprint([*training.model.modules(), training.optimizer])
    with belady.virtualize(training.model, ROOM, policy="floor", engine="auto") as vm:
        training.run(plain, range(6))
    assert footprint([*training.model.modules(), training.optimizer]) == before
    assert differences(expected.outcome(), training.outcome()) == []
    run = vm.run()
    assert run is not None
    assert (run.trace.source is Source.GRAPH) is (task is CNN)
    said = "engine='eager', since a call could not be captured as a whole: "
    assert [note.startswith(said) for note in run.notes] == ([] if task is CNN else [True])


class Deciding(nn.Module):
    """Goes by a number that it has computed, so that nothing captures it as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) if bool(x.isfinite().all()) else x
        return x


def test_what_auto_leaves_to_hooks_is_computed_again_as_if_nothing_had_been_captured() -> None:
    assert not compiled_anything()
    model, x = Deciding(), torch.randn(512, 64)
    with belady.virtualize(model, 900_000, policy="hybrid", engine="auto") as vm:
        for _ in range(5):
            model(x).sum().backward()
        run = vm.run()
    assert run is not None
    assert run.trace.source is not Source.GRAPH
    assert not [note for note in run.notes if "torch.compile" in note]
    assert run.plan.decisions
    # Ways to results were learned, which are not where compiled code may run.
    assert any(op.replayable for op in run.trace.ops)
    assert frames_compiled() > 0
    assert not compiled_anything()
    # What anybody else compiles counts, also after torch has forgotten all.
    torch.compile(torch.sin, backend="eager")(x)
    assert compiled_anything()
    torch._dynamo.reset()
    assert not compiled_anything()
    torch.compile(torch.cos, backend="eager")(x)
    assert compiled_anything()


class Tracing(nn.Module):
    """Breaks its graph in a loop, if it does at all."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always, self.seen = always, list[float]()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if self.always:
                self.seen.append(x.sum().item())
        return x


def test_hooks_go_on_only_after_what_was_not_captured_went_back() -> None:
    model, x = Tracing(always=True), torch.randn(8, 16)
    with within(model, "hybrid") as vm:
        # Two calls, and one backward for both.
        (model(x) + model(x)).sum().backward()
        assert isinstance(vm._tracker.conductor, Session)
        for _ in range(4):
            model(x).sum().backward()
        assert not isinstance(vm._tracker.conductor, Session)
        assert vm.run() is not None


class Given:
    """What a model gives, as an object that torch knows nothing of."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Objective(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Tracing(always=True)

    def forward(self, x: Tensor) -> Given:
        return Given(self.inner(x).square().sum())


def test_hooks_go_on_where_a_model_gives_an_object() -> None:
    model = Objective()
    with within(model, "hybrid") as vm:
        for _ in range(8):
            model(torch.randn(8, 16)).loss.backward()
        assert vm.run() is not None


def test_hooks_go_on_beside_a_model_that_does_not_learn() -> None:
    student, teacher = Tracing(always=True), Tracing(always=True).requires_grad_(False)
    with belady.virtualize([student, teacher], 1 << 30, engine="graph") as vm:
        for _ in range(8):
            x = torch.randn(8, 16)
            (student(x) - teacher(x)).square().sum().backward()
        assert vm.run() is not None


def test_a_first_call_that_nothing_is_trained_by_leaves_a_model_to_graphs() -> None:
    model, x = Tracing(always=False), torch.randn(8, 16)
    with within(model) as vm:
        with FlopCounterMode(display=False):
            # A reason why something was not captured.
            model(x)
        model.requires_grad_(False)
        model(x)
        model.requires_grad_(True)
        for _ in range(4):
            model(x).sum().backward()
        run = vm.run()
    assert run is not None
    assert run.trace.source is Source.GRAPH


class Sometimes(Talking):
    """Only what is large is captured as a whole."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if len(x) < 8 else self.second(torch.tanh(self.first(x)))


def test_auto_stays_with_graphs_where_a_later_call_breaks_one() -> None:
    task = Task("sometimes", lambda: [Sometimes()], batch)
    expected, training = Training(task).run(short_at_the_end, range(6)), Training(task)
    with belady.virtualize(training.model, ROOM, policy="floor", engine="auto") as vm:
        training.run(short_at_the_end, range(6))
    assert differences(expected.outcome(), training.outcome()) == []
    run = vm.run()
    assert run is not None
    assert run.trace.source is Source.GRAPH
    assert run.notes[0].startswith("not captured, and so not managed: ")


def test_auto_leaves_errors_of_the_program_as_they_are() -> None:
    model = nn.Linear(4, 4)
    with belady.virtualize(model, ROOM, engine="auto") as vm:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(2, 5))
        model(torch.randn(2, 4)).sum().backward()
        assert vm._tracker.conductor is not None


def compiled() -> nn.Module:
    model = nn.Linear(2, 2)
    model.compile(backend="eager")
    return model


def replaced() -> nn.Module:
    model = nn.Linear(2, 2)
    model.forward = lambda x: x * model.weight.sum()  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (compiled, "compiled already"),
        (lambda: torch.compile(nn.Linear(2, 2), backend="eager"), "compiled already"),
        (replaced, "was replaced on the instance"),
    ],
    ids=["compiled in place", "compiled", "replaced"],
)
def test_a_module_that_is_not_its_own_is_refused(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        within(make())


def test_auto_leaves_a_module_that_is_not_its_own_to_hooks() -> None:
    modules = [nn.Linear(2, 2), replaced()]
    with belady.virtualize(modules, ROOM, policy="floor", engine="auto") as vm:
        optimizer = torch.optim.SGD([it for module in modules for it in module.parameters()], 0.1)
        for _ in range(5):
            modules[1](modules[0](torch.randn(2, 2))).sum().backward()
            optimizer.step()
    run = vm.run()
    assert run is not None
    assert run.trace.source is Source.EAGER
    assert run.trace.roots == ("Linear", "Linear")
    assert run.notes[-1].startswith("engine='eager', since the forward of Linear was replaced")


def test_what_does_not_go_together_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="unknown engine 'eagre': one of eager, graph"):
        belady.virtualize(model, ROOM, engine="eagre")
    with pytest.raises(ValueError, match="can change bits"):
        belady.virtualize(model, ROOM, engine="inductor", exact=True)
    with within(model) as vm, pytest.raises(RuntimeError, match="inside the module"):
        vm.iteration()
