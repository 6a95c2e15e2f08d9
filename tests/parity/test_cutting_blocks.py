"""A batch norm of a residual network over the budget: `auto` runs blocks, or all, in slices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import belady
from belady.errors import InfeasibleBudgetError
from belady.ir.plan import Recompute
from belady.ir.trace import Tier
from benchmarks.workloads.residual import Bottleneck, ResNet
from tests.parity.test_cutting import ITERATIONS, images, needed
from tests.support.models import Task
from tests.support.training import Training, footprint, plain


class Small(nn.Module):
    """Two bottlenecks in a row, wide between them and narrow at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 7, 2, 3)
        self.layer1 = nn.Sequential(Bottleneck((8, 8), 1), Bottleneck((32, 8), 2))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer1(self.stem(x)).mean((2, 3)))


class Whole(ResNet):
    """As large at its stem, which is a child of no Sequential."""

    def __init__(self) -> None:
        super().__init__((1, 1), 16)
        self.layer3, self.layer4 = nn.Identity(), nn.Identity()
        self.fc = nn.Linear(128, 10)


SMALL = Task("residual", lambda: [Small()], images)
WHOLE = Task("residual with a norm at its stem", lambda: [Whole()], images)


@pytest.mark.parametrize(
    ("task", "share", "named"),
    [(SMALL, 0.85, "layer1 runs in"), (WHOLE, 0.8, "the model runs in")],
    ids=str,
)
def test_a_residual_network_trains_below_its_floor(task: Task, share: float, named: str) -> None:
    budget = int(needed("floor", task=task) * share)
    training = Training(task)
    with (
        belady.virtualize(training.models, budget, exact=True),
        pytest.raises(InfeasibleBudgetError),
    ):
        training.loss(0)
    with belady.virtualize(training.models, budget) as vm:
        training.run(plain, ITERATIONS)
        run = vm.run()
        assert named in vm.report()
    assert run is not None
    assert run.measured is not None
    assert run.measured.peak(Tier.DEVICE) <= budget
    foretold = run.plan.predicted_peak_bytes
    if any(isinstance(it, Recompute) for it in run.plan.decisions.values()):
        # What is made again is gone before the anchor at which the trace saw it go.
        assert run.measured.peak(Tier.DEVICE) <= foretold
    else:
        assert run.measured.peak(Tier.DEVICE) == foretold
    assert run.measured.defaults == ()
    assert run.plan.numerics == ("sections",)
    expected = Training(task).run(plain, ITERATIONS)
    for one, two in zip(training.losses, expected.losses, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
    assert footprint(training.model.modules()) == footprint(expected.model.modules())
