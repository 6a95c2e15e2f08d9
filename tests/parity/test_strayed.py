"""Programs that compute something else than when they were observed, while values are replayed."""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import belady
from belady.eager import kinds
from belady.eager.digests import Digests, _Late, digest
from belady.errors import PlanMismatchError, ReplayError
from belady.ir.plan import Plan, Recompute
from belady.ir.replay import COMPARED_ONE_IN
from belady.ir.run import Run
from belady.measure.arguments import alike_of, is_alike, numbers_of
from belady.memory.geometry import content_of
from tests.support.models import Task
from tests.support.modes import Counting
from tests.support.training import Training, differences, footprint, plain, raising

Change = Callable[["Shape", int], None]
ROOM = 1 << 30
# Two are observed, three follow the plan before anything changes.
BEFORE = 5
SCALED = "aten.mul.Tensor"


class Shape(nn.Module):
    """A network whose forward depends on attributes that a training loop sets."""

    scale, flipped, swapped, extra = 1.5, False, False, False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 1024), nn.Linear(1024, 10)
        self.norm = nn.LayerNorm(1024)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x)) * self.scale
        hidden = self.norm(x).add(x, alpha=self.scale)
        hidden = torch.tanh(hidden) if self.flipped else torch.sigmoid(hidden)
        if self.extra:
            hidden = hidden + 1
        one, two = hidden.sigmoid(), x.sigmoid()
        hidden = torch.sub(two, one) if self.swapped else torch.sub(one, two)
        return self.last(hidden * self.scale)


def rows(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, 10, (size,), generator=generator)
    return torch.randn(size, 64, generator=generator), labels


SHAPE = Task("shape", lambda: [Shape()], rows)


def same(_model: Shape, _index: int) -> None:
    """Nothing changes."""


def once(model: Shape, index: int) -> None:
    if index == BEFORE:
        model.scale = 0.5


def always(model: Shape, index: int) -> None:
    model.scale = 1 + index / 10


def branches(model: Shape, index: int) -> None:
    model.flipped = index == BEFORE


def grows(model: Shape, index: int) -> None:
    model.extra = index >= BEFORE


def under(change: Change) -> Callable[[Training, int], list[Tensor]]:
    def step(training: Training, index: int) -> list[Tensor]:
        model = training.model
        assert isinstance(model, Shape)
        change(model, index)
        return plain(training, index)

    return step


def replayed(plan: Plan) -> int:
    return sum(isinstance(decision, Recompute) for decision in plan.decisions.values())


def names(run: Run, plan: Plan) -> set[str]:
    """Names of the ops that ``plan`` runs again; all iterations issue the same."""
    replays = [it for it in plan.decisions.values() if isinstance(it, Recompute)]
    return {run.trace.ops[op].name for replay in replays for op in replay.ops}


def compared(change: Change, iterations: int) -> Run:
    """Train with and without belady; the results must be the same."""
    expected = Training(SHAPE).run(under(change), range(iterations)).outcome()
    training = Training(SHAPE)
    with belady.virtualize(training.models, ROOM) as vm:
        training.run(under(change), range(iterations))
        run = vm.run()
    assert differences(expected, training.outcome()) == []
    assert run is not None
    return run


def test_calls_that_repeat_are_replayed(replaying: list[Plan]) -> None:
    run = compared(same, 6)
    assert len(replaying) == 1
    assert replayed(run.plan) >= 3
    assert run.measured is not None
    assert run.measured.defaults == ()


def test_a_number_that_changes_once_is_observed_again(replaying: list[Plan]) -> None:
    run = compared(once, BEFORE + 8)
    assert len(replaying) == 2
    # What is made with the number is not replayed again: it may change once more.
    assert SCALED in names(run, replaying[0])
    assert SCALED not in names(run, run.plan)
    assert replayed(run.plan) > 0


def test_a_number_that_always_changes_is_not_replayed(replaying: list[Plan]) -> None:
    run = compared(always, 12)
    assert len(replaying) == 2
    assert SCALED in names(run, replaying[0])
    assert SCALED not in names(run, run.plan)
    assert replayed(run.plan) > 0
    assert run.measured is not None
    assert run.measured.defaults == ()


@pytest.mark.parametrize("change", [branches, grows])
def test_another_branch_changes_no_bit(change: Change, replaying: list[Plan]) -> None:
    compared(change, BEFORE + 6)
    assert replaying


def test_what_no_call_shows_is_an_error_and_then_replayed_no_more(replaying: list[Plan]) -> None:
    training = Training(SHAPE)
    model = training.model
    assert isinstance(model, Shape)
    with belady.virtualize(training.models, ROOM) as vm:
        training.run(plain, range(BEFORE))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        model.swapped = True
        with pytest.raises(PlanMismatchError, match="no optimizer has used them"):
            training.loss(0).backward()
        assert all(map(torch.equal, before, model.parameters()))
        training.optimizer.zero_grad()
        expected = Training(SHAPE)
        assert isinstance(expected.model, Shape)
        expected.run(plain, range(BEFORE))
        expected.model.swapped = True
        for each in (training, expected):
            each.run(plain, range(6))
        assert differences(expected.outcome(), training.outcome()) == []
        run = vm.run()
    assert run is not None
    assert replayed(replaying[0]) > 0
    assert replayed(run.plan) == 0


class Event:
    """Of an answer that is there when somebody waits for it, and not before."""

    def __init__(self) -> None:
        self.there = False

    def query(self) -> bool:
        return self.there

    def synchronize(self) -> None:
        self.there = True


class LateDigests(Digests):
    """As on a GPU: nobody waits for the answer."""

    def __init__(self, **_: object) -> None:
        super().__init__(at_once=False)

    def _answer(self, pairs: Any) -> bool:
        if self._waits:
            return super()._answer(pairs)
        self._late.append(_Late(self._iteration, pairs.compared(), cast("Any", Event()), pairs))
        return True


@pytest.fixture
def late(replaying: list[Plan], monkeypatch: pytest.MonkeyPatch) -> list[Digests]:
    """The digests of every plan."""
    made: list[Digests] = []

    def remembered(**_: object) -> Digests:
        made.append(LateDigests())
        return made[-1]

    monkeypatch.setattr(kinds, "Digests", remembered)
    return made


def run_until_asked(training: Training, digests: Digests) -> None:
    """Iterate until a replay is compared, whose answer is then on its way."""
    for count in range(COMPARED_ONE_IN):
        training.run(plain, [count])
        if digests._late:
            return
    raise AssertionError("nothing was compared")


def test_in_the_first_iteration_under_a_plan_all_is_compared_before_an_optimizer_steps(
    late: list[Digests],
) -> None:
    training = Training(SHAPE)
    assert isinstance(training.model, Shape)
    with belady.virtualize(training.models, ROOM):
        training.run(plain, range(2))
        assert late
        training.model.swapped = True
        with pytest.raises(ReplayError, match="no optimizer has used them"):
            training.loss(0).backward()


@pytest.mark.usefixtures("late")
def test_later_the_error_comes_while_it_helps() -> None:
    training = Training(SHAPE)
    assert isinstance(training.model, Shape)
    with belady.virtualize(training.models, ROOM) as vm:
        training.run(plain, range(BEFORE))
        training.model.swapped = True
        with pytest.raises(ReplayError, match="known late"):
            training.run(plain, range(COMPARED_ONE_IN + 1))
        training.optimizer.zero_grad()
        training.run(plain, range(6))
        run = vm.run()
    assert run is not None
    assert replayed(run.plan) == 0


def test_another_kind_of_iteration_does_not_put_the_error_off(late: list[Digests]) -> None:
    training = Training(SHAPE)
    assert isinstance(training.model, Shape)
    with belady.virtualize(training.models, ROOM):
        training.run(plain, range(BEFORE))
        training.model.swapped = True
        run_until_asked(training, late[-1])
        with pytest.raises(ReplayError, match="known late"):
            training.model(training.batch(0)[0][:1])


def test_a_late_error_does_not_replace_the_users(late: list[Digests]) -> None:
    training = Training(SHAPE)
    assert isinstance(training.model, Shape)

    def fail() -> None:
        with belady.virtualize(training.models, ROOM):
            training.run(plain, range(BEFORE))
            training.model.swapped = True
            run_until_asked(training, late[-1])
            raise KeyError("the user's")

    with pytest.raises(KeyError) as told:
        fail()
    assert "known late" in told.value.__notes__[0]


def test_whoever_closes_is_told(late: list[Digests]) -> None:
    training = Training(SHAPE)
    assert isinstance(training.model, Shape)
    vm = belady.virtualize(training.models, ROOM)
    training.run(plain, range(BEFORE))
    training.model.swapped = True
    run_until_asked(training, late[-1])
    with pytest.raises(ReplayError, match="known late"):
        vm.close()
    # Nothing of it is left.
    training.run(plain, range(2))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("exact", "said"), [(False, "known late"), (True, "no optimizer has used them")]
)
def test_a_gpu_goes_on_while_replays_are_compared_unless_it_must_be_exact(
    replaying: list[Plan], exact: bool, said: str
) -> None:
    training = Training(SHAPE, "cuda")
    model = training.model
    assert isinstance(model, Shape)
    with belady.virtualize(training.models, ROOM, exact=exact) as vm:
        training.run(plain, range(BEFORE + 4))
        assert replayed(replaying[0]) > 0
        model.swapped = True
        with pytest.raises(PlanMismatchError, match=said):
            training.run(plain, range(COMPARED_ONE_IN + 1))
        training.optimizer.zero_grad()
        training.run(plain, range(6))
        run = vm.run()
    assert run is not None
    assert replayed(run.plan) == 0


def test_a_wrong_gradient_never_reaches_an_optimizer_that_steps_inside_backward(
    replaying: list[Plan],
) -> None:
    training = Training(SHAPE)
    model = training.model
    assert isinstance(model, Shape)
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    with belady.virtualize(training.models, ROOM):
        for index in range(BEFORE):
            training.loss(index).backward()
        assert replaying
        # Only what comes after the first replay is wrong.
        untouched = [model.first.weight.detach().clone(), model.norm.weight.detach().clone()]
        model.swapped = True
        with pytest.raises(PlanMismatchError):
            training.loss(0).backward()
        assert torch.equal(untouched[0], model.first.weight)
        assert torch.equal(untouched[1], model.norm.weight)


@pytest.mark.parametrize("iterations", [1, 2, 3, 5])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_interruption_leaves_no_mode(
    error: type[BaseException], iterations: int, replaying: list[Plan]
) -> None:
    training = Training(SHAPE).run(plain, range(1))
    before = footprint(training.model.modules())
    with belady.virtualize(training.model, ROOM):
        training.run(plain, range(iterations))
        with raising(training.model, error, 2), suppress(error):
            training.loss(0)
    assert footprint(training.model.modules()) == before
    assert len(replaying) == (iterations > 1)


class Moded(Shape):
    """Uses a mode of its own in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = Counting()

    def forward(self, x: Tensor) -> Tensor:
        with self.mode:
            return super().forward(x)


def test_a_mode_of_the_user_sees_what_it_sees_without_belady(replaying: list[Plan]) -> None:
    task, seen = Task("moded", lambda: [Moded()], rows), []
    for managed in (False, True):
        training = Training(task)
        vm = belady.virtualize(training.models, ROOM) if managed else None
        training.run(plain, range(BEFORE - 1))
        assert isinstance(training.model, Moded)
        training.model.mode.calls = 0
        training.run(plain, range(BEFORE))
        seen.append((training.model.mode.calls, training.outcome()))
        if vm is not None:
            vm.close()
    assert seen[0][0] == seen[1][0]
    assert differences(seen[0][1], seen[1][1]) == []
    assert replayed(replaying[0]) >= 3


def test_nothing_is_replayed_beside_compiled_code(
    replaying: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._dynamo.convert_frame as frames

    monkeypatch.setattr(frames, "FRAME_COUNTER", 1)
    run = compared(same, BEFORE)
    assert replayed(run.plan) == 0


def test_compiling_later_ends_replays(
    replaying: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._dynamo.convert_frame as frames

    def compiled(_model: Shape, index: int) -> None:
        if index == BEFORE:
            monkeypatch.setattr(frames, "FRAME_COUNTER", 1)

    monkeypatch.setattr(frames, "FRAME_COUNTER", 0)
    expected = Training(SHAPE).run(plain, range(BEFORE + 5)).outcome()
    training = Training(SHAPE)
    with belady.virtualize(training.models, ROOM) as vm:
        training.run(under(compiled), range(BEFORE + 5))
        run = vm.run()
    assert differences(expected, training.outcome()) == []
    assert run is not None
    assert replayed(replaying[0]) > 0
    assert replayed(run.plan) == 0


def test_nothing_is_replayed_among_processes(
    replaying: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert replayed(compared(same, BEFORE).plan) == 0


def test_an_error_that_was_caught_still_stops_the_optimizer(replaying: list[Plan]) -> None:
    training = Training(SHAPE)
    model = training.model
    assert isinstance(model, Shape)
    with belady.virtualize(training.models, ROOM):
        training.run(plain, range(BEFORE))
        model.swapped = True
        loss = training.loss(0)
        with suppress(PlanMismatchError):
            loss.backward()
        before = model.first.weight.detach().clone()
        with pytest.raises(PlanMismatchError):
            training.optimizer.step()
        assert torch.equal(before, model.first.weight)


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (1, 2),
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (complex(1, 0.0), complex(1, -0.0)),
        (np.float32(0), np.float32(-0.0)),
        (np.float32(1), np.float32(2)),
        (np.int64(1), np.int64(2)),
        (Kind.ONE, Kind.TWO),
        ((1, 2), (2, 1)),
        (slice(1, 2), slice(1, 3)),
        ("a", "b"),
        (None, 0),
        (nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))),
    ],
)
def test_arguments_that_differ_are_told_apart(before: object, after: object) -> None:
    first, same_again, other = (numbers_of((it,), {"way": 1}) for it in (before, before, after))
    assert first is not None
    assert first == same_again
    assert first != other
    alike = alike_of((before,), {"way": 1})
    assert alike is None or not is_alike(alike, (after, "way", 1))


@pytest.mark.parametrize(
    ("before", "again", "after"),
    [
        (1000, int("1000"), True),
        (0.5, float("0.5"), -0.5),
        ((1000, 2), (int("1000"), 2), (2, 1000)),
        ([1000, 2], [int("1000"), 2], (1000, 2)),
        (torch.Size([1, 2]), torch.Size([1, 2]), (1, 2)),
        ([torch.ones(2)], [torch.zeros(2)], [torch.ones(2), torch.ones(2)]),
        ([1, None], [1, None], None),
        ((1, 2), (1, 2), (True, 2)),
        ((0.0,), (0.0,), (-0.0,)),
        ((1, (1000, "a")), (1, (int("1000"), "a")), (1, (1000, "b"))),
        ([], [], [torch.ones(2)]),
        ([], [], ()),
    ],
)
def test_arguments_made_anew_are_seen_to_be_the_same(
    before: object, again: object, after: object
) -> None:
    alike = alike_of((before,), {})
    assert alike is not None
    assert is_alike(alike, (again,))
    assert not is_alike(alike, (after,))
    assert not is_alike(alike, (None,))
    assert not is_alike(alike, (again, again))
    assert numbers_of((before,), {}) == numbers_of((again,), {}) != numbers_of((after,), {})


def test_a_list_that_was_changed_is_another() -> None:
    numbers = [1, 2]
    alike = alike_of((numbers,), {})
    numbers[0] = 3
    assert alike is not None
    assert not is_alike(alike, (numbers,))


def test_what_equals_nothing_is_never_the_same() -> None:
    assert not is_alike((float("nan"),), (float("nan"),))
    assert not is_alike((0.0,), (-0.0,))


def test_an_argument_that_cannot_be_compared_is_not_trusted() -> None:
    assert numbers_of((object(),), {}) is None
    assert numbers_of((1, [np.ones(2)]), {}) is None
    assert numbers_of((torch.ones(2),), {"out": [torch.ones(2)]}) is not None


def test_replays_that_could_not_be_compared_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    digests, content = Digests(), torch.zeros(8, dtype=torch.uint8)

    def interrupted(*_: Tensor) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(torch, "cat", interrupted)
        with pytest.raises(KeyboardInterrupt):
            digests.compare(digest(content), digest(content), "op 7")
    with pytest.raises(PlanMismatchError, match="could not be compared"):
        digests.demand_equal()
    digests.forget()
    digests.demand_equal()


@pytest.mark.parametrize("size", [(1000, 1000), (1024, 1024), (3, 1024, 1024), (1024, 1024, 5)])
def test_digests_tell_a_square_from_its_transpose(size: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    square = torch.randn(size, generator=generator, dtype=torch.float64)
    turned = square.transpose(*(at for at, n in enumerate(size) if n >= 1000)).contiguous()
    content, other = (content_of(it, 0, square.nbytes) for it in (square, turned))
    assert not torch.equal(digest(content), digest(other))


@pytest.mark.parametrize("columns", [1021, 1024, 2042, 512])
def test_digests_tell_moved_and_turned_tensors_apart(columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.randn(8, columns, generator=generator) for _ in range(2))
    wide = torch.randn(8, columns, generator=generator, dtype=torch.float64)
    pairs = [
        (torch.cat([one, two]), torch.cat([two, one])),
        (one, one.roll(1, 0)),
        (one, -one),
        (wide, -wide),
        (wide, wide.flip(1)),
    ]
    for first, other in pairs:
        digests = [
            digest(content_of(it, 0, it.untyped_storage().nbytes())) for it in (first, other)
        ]
        assert not torch.equal(*digests)
