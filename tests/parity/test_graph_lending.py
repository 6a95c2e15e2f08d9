"""Optimizers' steps are lent what launches leave idle, and nothing that they keep is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import belady
from belady.graph import beside, launching, told
from belady.graph.launched import Launched
from belady.graph.launching import Launching
from belady.graph.prospect import Stepping
from belady.graph.steps import Loans, is_known, may_lend
from belady.measure.monitor import Monitor
from belady.memory.carrier import Carrier
from belady.memory.launches import Launches
from belady.memory.ledger import Ledger
from belady.simulate.stretch import Event
from tests.parity.test_graph_launched import (
    CNN,
    FIRST,
    ITERATIONS,
    asked_to_leave,
    first_one_lacks,
    train,
)
from tests.support.launches import Rerun
from tests.support.training import Step, Training, accumulating, differences, plain, repeatable

# Iterations whose step may be lent something.
LAUNCHED = len(ITERATIONS) - FIRST
EVENTS: list[Event] = [(0, 512), (0, 0)]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with repeatable():
        yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def all_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little as it is."""
    monkeypatch.setattr(told, "_MATTERS", -1.0)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU's allocator would note."""

    def begin(self: Ledger) -> None:
        self._open = True

    def end(self: Ledger) -> list[Event]:
        was, self._open = self._open, False
        return EVENTS if was else []

    monkeypatch.setattr(Ledger, "begin", begin)
    monkeypatch.setattr(Ledger, "end", end)
    monkeypatch.setattr(Ledger, "drop", lambda self: setattr(self, "_open", False))


def test_a_step_is_lent_what_launches_leave_idle(
    noted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made,) = train(CNN, plain, "vdnn_all", monkeypatch)
    assert made.launched == 2 * LAUNCHED
    assert made.lent == LAUNCHED


def test_a_step_that_comes_seldom_is_lent_it_then(
    noted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, made = train(CNN, accumulating, "vdnn_all", monkeypatch)
    assert 0 < made.lent < made.launched / 2


def calling_back(training: Training, index: int) -> list[Tensor]:
    loss = training.loss(index)
    loss.backward()
    training.optimizer.step(lambda: 0.0)
    training.optimizer.zero_grad()
    return [loss]


def test_a_step_that_calls_back_is_lent_nothing(
    noted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made,) = train(CNN, calling_back, "vdnn_all", monkeypatch)
    assert made.launched
    assert not made.lent


class Ours(torch.optim.AdamW):
    """One that torch does not have."""


def test_a_step_that_nobody_knows_is_lent_nothing(
    noted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.optim, "AdamW", Ours)
    (made,) = train(CNN, plain, "vdnn_all", monkeypatch)
    assert made.launched
    assert not made.lent


@pytest.mark.parametrize("kind", [Ours, torch.optim.AdamW])
def test_another_optimizer_has_the_memory_of_launches(
    kind: type[torch.optim.AdamW], noted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that nobody knows, or that has no state yet."""
    given_back: list[int] = []
    rest = Launching.rest

    def resting(self: Launching) -> None:
        if self._launched is not None:
            given_back.append(self._row)
        rest(self)

    def changing(training: Training, index: int) -> list[Tensor]:
        if index == FIRST + 3:
            training.optimizers = [kind(training.model.parameters(), 1e-4)]
        return plain(training, index)

    monkeypatch.setattr(Launching, "rest", resting)
    first, *others = train(CNN, changing, "vdnn_all", monkeypatch)
    assert first.launched == 2 * 4
    assert first.lent == 3
    # Captured again, one that is not known asks for memory of its own: another plan leaves it that.
    assert [bool(it.launched) for it in others] == ([False, True] if kind is Ours else [True])
    assert [bool(it.lent) for it in others] == ([False, False] if kind is Ours else [True])
    assert len(given_back) == 1


def test_what_a_step_keeps_ends_launches(noted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rerun, "keeping", True)
    made = train(CNN, plain, "vdnn_all", monkeypatch)
    # Captured again, and each time it was seen before the next launch.
    assert len(made) > 1
    assert [it.lent for it in made] == [1] * len(made)
    assert [it.launched for it in made] == [2] * len(made)


@pytest.mark.parametrize("lacking", [True, False])
def test_a_step_that_cannot_be_lent_to_keeps_its_memory(
    lacking: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    asked = asked_to_leave(monkeypatch)
    monkeypatch.setattr(beside, "between_bytes", lambda kind, *, lends: 5 if lends else 9)
    if lacking:
        # Otherwise nobody knows what it takes.
        request.getfixturevalue("noted")
    monkeypatch.setattr(Rerun, "lacking", lacking)
    made = train(CNN, plain, "vdnn_all", monkeypatch)
    assert [bool(it.launched) for it in made] == [False, True]
    assert [it.lent for it in made] == [0, 0]
    assert len(asked) == 2
    assert asked[1] - asked[0] == 9 - 5


def test_a_plan_that_left_what_a_capture_lacked_leaves_a_step_its_memory_too(
    noted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asked_to_leave(monkeypatch)
    first_one_lacks(asked, monkeypatch)
    monkeypatch.setattr(Rerun, "lacking", True)
    *_, last = train(CNN, plain, "vdnn_all", monkeypatch)
    assert len(asked) == 3
    assert last.launched
    assert not last.lent


def interrupt(optimizer: torch.optim.Optimizer) -> None:
    """Have a step end with an error before it has done anything."""

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    handle.remove()


def failing_once(training: Training, index: int) -> list[Tensor]:
    """As `plain`, but that one step is interrupted, and done afterwards."""
    loss = training.loss(index)
    loss.backward()
    if index == FIRST + 3:
        interrupt(training.optimizer)
    training.optimizer.step()
    training.optimizer.zero_grad()
    return [loss]


def interrupted(training: Training, index: int) -> list[Tensor]:
    """As `plain`, but that one step does not come to its end."""
    if index != FIRST + 3:
        return plain(training, index)
    loss = training.loss(index)
    loss.backward()
    interrupt(training.optimizer)
    training.optimizer.zero_grad()
    return [loss]


@pytest.mark.parametrize("step", [failing_once, interrupted])
def test_a_step_that_is_interrupted_gives_back_what_it_was_lent(
    step: Step, noted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made,) = train(CNN, step, "vdnn_all", monkeypatch)
    assert made.launched == 2 * LAUNCHED
    assert not made.lending


class Idle:
    """As far as a loan knows it, `Launched`."""

    def __init__(self, *, idle: bool) -> None:
        self.idle, self.launches = idle, Rerun([], None)


@pytest.mark.parametrize("idle", [True, False])
def test_nothing_is_lent_while_a_backward_is_owed(idle: bool) -> None:
    given_up: list[None] = []
    loans = Loans(Ledger(torch.device("cpu")), lambda: given_up.append(None))
    launched = Idle(idle=idle)
    loans.lend_of(launched)  # type: ignore[arg-type]
    loans.step_begins(known=True, settled=True)
    assert launched.launches.lending is idle
    # The next plan leaves such a step what it takes.
    assert loans.possible is idle
    assert len(given_up) == (not idle)
    loans.step_ended()
    assert not launched.launches.lending


def test_a_step_within_a_step_ends_what_that_was_lent() -> None:
    loans, launched = Loans(Ledger(torch.device("cpu")), pytest.fail), Idle(idle=True)
    loans.lend_of(launched)  # type: ignore[arg-type]
    for _ in range(2):
        loans.step_begins(known=True, settled=True)
    for _ in range(2):
        loans.step_ended()
        assert not launched.launches.lending
    assert loans.over()


def without_momentum(training: Training, index: int) -> list[Tensor]:
    """As `plain`, with an optimizer beside it that never has a state."""
    if len(training.optimizers) == 1:
        head = [*training.model.parameters()][-2:]
        training.optimizers.append(torch.optim.SGD(head, 1e-3, weight_decay=0.1))
    loss = training.loss(index)
    loss.backward()
    for optimizer in training.optimizers:
        optimizer.step()
    training.optimizer.zero_grad()
    return [loss]


def test_an_optimizer_without_state_is_lent_to(
    noted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made,) = train(CNN, without_momentum, "vdnn_all", monkeypatch)
    assert made.launched == 2 * LAUNCHED
    assert made.lent == 2 * LAUNCHED


@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, torch.optim.LBFGS, Ours])
def test_what_multiplies_matrices_or_calls_back_is_not_known(
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    assert not is_known(optimizer([weight]))
    assert is_known(torch.optim.Adam([weight]))


def test_more_than_was_noted_is_not_known() -> None:
    """As where another optimizer steps in some iterations alone."""
    launched = Idle(idle=True)
    attempt = SimpleNamespace(room_bytes=1 << 30)
    events = [(0, 4000), (1, 5000), (0, 0), (2, 3000), (1, 0), (2, 0)]
    for taken, fits in ((9000, True), (12_900, True), (13_000, False)):
        step = Stepping(taken, events)
        assert may_lend(launched, attempt, step) is fits  # type: ignore[arg-type]


def test_what_lasts_through_a_step_counts_where_nothing_is_lent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, most = [0], [0]
    for name, count in (("memory_allocated", held), ("max_memory_allocated", most)):
        monkeypatch.setattr(torch.cuda, name, lambda device, it=count: it[0])
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: most.__setitem__(0, held[0])
    )

    def hold(nbytes: int) -> None:
        held[0] += nbytes
        most[0] = max(most[0], held[0])

    monitor = Monitor(torch.device("cpu"), Carrier(torch.device("cpu")))
    sample = monitor.end(monitor.begin(0))
    monitor._last = sample
    hold(1000)
    monitor.step_begins()
    hold(800)
    hold(-800)
    monitor.step_ended()
    hold(300)
    hold(-1300)
    monitor.after()
    assert (sample.outside_bytes, sample.stepping_bytes, sample.beside_bytes) == (1300, 800, 1800)


# -- on a GPU -------------------------------------------------------------------------------------

MIB = 2**20
OPTIMIZERS: dict[str, Callable[[Sequence[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda its: torch.optim.SGD(its, 0.01, momentum=0.9, weight_decay=0.1),
    "adamw": lambda its: torch.optim.AdamW(its, 1e-3),
    "amsgrad": lambda its: torch.optim.Adam(its, 1e-3, amsgrad=True),
    "one by one": lambda its: torch.optim.NAdam(its, 1e-3, foreach=False),
    "rmsprop": lambda its: torch.optim.RMSprop(its, 1e-3),
    "asgd": lambda its: torch.optim.ASGD(its, 1e-3),
}


def training_with(name: str) -> Training:
    training = Training(CNN, "cuda")
    training.optimizers = [OPTIMIZERS[name]([*it.parameters()]) for it in training.models]
    return training


def lent_on(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    """What something was lent of, each time."""
    monkeypatch.setattr(launching, "_GAINS", -100.0)
    lend, found = Loans.step_begins, list[Launched]()

    def note(self: Loans, *, known: bool, settled: bool) -> None:
        lend(self, known=known, settled=settled)
        if self._give_back is not None:
            assert self._launched is not None
            found.append(self._launched)

    monkeypatch.setattr(Loans, "step_begins", note)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_on_a_gpu_step_as_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lent = lent_on(monkeypatch)
    training = training_with(name)
    with belady.virtualize(training.models, "1GiB", policy="vdnn_all", engine="graph") as vm:
        training.run(plain, ITERATIONS)
        run = vm.run()
    assert run is not None
    assert any(told.NOTE in it for it in run.notes)
    # An iteration is measured without a capture, too, and two are rehearsed.
    assert len(lent) >= LAUNCHED - 3
    assert len({*map(id, lent)}) == 1
    expected = training_with(name).run(plain, ITERATIONS).outcome()
    assert differences(expected, training.outcome()) == []


@pytest.mark.gpu
def test_what_a_step_keeps_on_a_gpu_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    lent, kept = lent_on(monkeypatch), list[Tensor]()

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        (first, *_rest) = optimizer.param_groups[0]["params"]
        # As much as a step takes for a moment: there is room for it.
        kept.append(first.detach().clone())

    training = Training(CNN, "cuda")
    training.optimizer.register_step_post_hook(keep)
    with belady.virtualize(training.models, "1GiB", policy="vdnn_all", engine="graph"):
        training.run(plain, ITERATIONS)
    assert len({*map(id, lent)}) == len(lent) > 1
    plainly, expected = Training(CNN, "cuda"), list[Tensor]()
    plainly.optimizer.register_step_post_hook(
        lambda it, *_: expected.append(it.param_groups[0]["params"][0].detach().clone())
    )
    plainly.run(plain, ITERATIONS)
    assert len(kept) == len(expected)
    assert all(map(torch.equal, kept, expected))
    assert differences(plainly.outcome(), training.outcome()) == []


@pytest.mark.gpu
def test_what_is_lent_is_of_the_pool_and_given_back() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    launches, mine = Launches(device), torch.cuda.Stream()

    def issue() -> Tensor:
        idle = torch.ones(64 * MIB, dtype=torch.uint8, device=device)
        stays = torch.full((64 * MIB,), 7, dtype=torch.uint8, device=device)
        del idle
        return stays

    launch, given = launches.capture(issue)
    launches.over()
    launch()
    reserved = launches.reserved_bytes
    with torch.cuda.stream(mine):
        give_back = launches.lend()
        assert torch.cuda.current_stream() != mine
        taken = torch.zeros(48 * MIB, dtype=torch.uint8, device=device)
        assert launches.reserved_bytes == reserved
        assert not give_back()
        assert torch.cuda.current_stream() == mine
        del taken
        assert launches.lend()()
    assert launches.has_room_for([(0, 40 * MIB), (1, 20 * MIB), (0, 0), (1, 0)])
    assert launches.reserved_bytes == reserved
    assert not launches.has_room_for([(0, 1 << 50), (0, 0)])
    assert launches.lend()()
    assert (given == 7).all()
    del launch, given
    launches.forget()


@pytest.mark.gpu
def test_another_thread_may_take_back_what_was_lent() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    launches = Launches(device)
    launch, given = launches.capture(lambda: torch.ones(8 * MIB, device=device))
    launches.over()
    launch()
    found: list[bool] = []
    give_back = launches.lend()
    thread = threading.Thread(target=lambda: found.append(give_back()))
    thread.start()
    thread.join()
    # It cannot give the first one its stream again.
    assert found == [False]
    torch.cuda.set_stream(torch.cuda.default_stream(device))
    before = launches.reserved_bytes
    elsewhere = torch.ones(64 * MIB, device=device)
    assert launches.reserved_bytes > before
    del launch, given, elsewhere
    launches.forget()
