"""Sections under the engine: the bits of the same sections without it, near the whole batch's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from belady.ir.plan import Encode, Offload, Recompute, Section
from belady.ir.sections import apply
from belady.ir.trace import Tier
from belady.planners import plan
from belady.sections.wrap import wrap
from tests.parity import racing
from tests.parity.racing import hostile_carrier, observed, random_plan
from tests.parity.test_models import ITERATIONS, expected, train, train_at_the_floor
from tests.support import training as steps
from tests.support.models import CLASSES, CNN, Task
from tests.support.training import (
    Interruption,
    Step,
    Training,
    at_tight_budget,
    differences,
    plain,
)

SECTIONS = (
    Section(("layers.0",), 3),
    Section(("layers.1", "layers.2", "layers.3"), 4),
)
DROPOUT = (Section(("layers.4", "layers.5", "layers.6"), 3),)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Sequential(
                nn.Conv2d(3, 8, 3, padding=1),
                nn.BatchNorm2d(8),
                nn.ReLU(inplace=True),
                nn.Conv2d(8, 8, 3, padding=1),
                nn.BatchNorm2d(8),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
            ),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(256, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def cut(sections: Sequence[Section] = SECTIONS) -> list[nn.Module]:
    model = Convolutions()
    wrap(model, sections)
    return [model]


WHOLE = Task("whole", lambda: [Convolutions()], CNN.batch)
CUT = Task("cut", cut, CNN.batch)
DROPPING = Task("cut where dropout is", lambda: cut(DROPOUT), CNN.batch)
WITHOUT_NORM = Task("cut where no batch norm is", lambda: cut(SECTIONS[1:]), CNN.batch)


@pytest.mark.parametrize("task", [CUT, DROPPING], ids=str)
@pytest.mark.parametrize("policy", ["auto", "hybrid", "floor", "vdnn_all"])
def test_the_engine_changes_no_bit_of_sections(policy: str, task: Task, device: str) -> None:
    run = at_tight_budget(lambda budget: train(task, plain, policy, budget, device), device)
    assert run.plan.decisions or device == "cuda"


@pytest.mark.parametrize(
    "step",
    [
        steps.autocast,
        steps.accumulating,
        steps.evaluating,
        steps.short_at_the_end,
        steps.twice_backward,
        steps.abandoning,
        Interruption(KeyboardInterrupt, (1, 3)),
    ],
    ids=lambda step: getattr(step, "__name__", "interrupted"),
)
def test_habit_of_training_changes_no_bit_of_sections(step: Step, device: str) -> None:
    train_at_the_floor(CUT, step, device)


@pytest.mark.parametrize("task", [CUT, WITHOUT_NORM], ids=str)
def test_slices_may_be_made_again_and_encoded(task: Task) -> None:
    seen, kinds = observed(task, plain, "cpu"), set[type]()
    wanted = Training(task).run(plain, range(2)).outcome()
    for seed in range(4):
        made = random_plan(seen.trace, "threads", seed)
        kinds |= {type(it) for it in made.decisions.values()}
        carrier = hostile_carrier("threads")
        outcome, _ = racing.train(task, plain, made, seen, carrier)
        assert differences(wanted, outcome) == []
        carrier.close()
    assert {Recompute, Encode, Offload} <= kinds


def test_measured_peak_is_the_planned_peak_and_lower() -> None:
    peaks = []
    for task in (WHOLE, CUT):
        run = train_at_the_floor(task, plain, "cpu")
        assert run.measured is not None
        assert run.measured.peak(Tier.DEVICE) == run.plan.predicted_peak_bytes
        assert run.measured.defaults == ()
        peaks.append(run.plan.predicted_peak_bytes)
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize(
    ("task", "sections", "unforeseen"),
    [(WITHOUT_NORM, SECTIONS[1:], 0), (DROPPING, DROPOUT, 0), (CUT, SECTIONS, 1024)],
    ids=str,
)
def test_the_peak_is_foretold_from_an_iteration_without_sections(
    task: Task, sections: Sequence[Section], unforeseen: int
) -> None:
    observed, real = (train_at_the_floor(it, plain, "cpu") for it in (WHOLE, task))
    predicted = plan("floor", apply(observed.trace, sections), real.hardware, real.plan.budget)
    # Of a batch norm, vectors of one number a channel.
    gap = real.plan.predicted_peak_bytes - predicted.predicted_peak_bytes
    assert 0 <= gap <= unforeseen


@pytest.mark.parametrize("task", [CUT, DROPPING], ids=str)
def test_training_goes_the_same_way_as_on_the_whole_batch(task: Task, device: str) -> None:
    whole, cut = (expected(it, plain, device) for it in (WHOLE, task))
    assert whole.keys() == cut.keys()
    for name in whole:
        if name.startswith("loss"):
            assert torch.allclose(whole[name], cut[name], rtol=1e-3)


def test_random_numbers_are_those_of_the_whole_batch() -> None:
    states = []
    for task in (WHOLE, CUT, DROPPING):
        Training(task).run(plain, ITERATIONS)
        states.append(torch.get_rng_state())
    assert all(torch.equal(states[0], state) for state in states)
