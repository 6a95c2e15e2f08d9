"""`belady.cross_entropy` under the engine: its own bits without it, near plain PyTorch's loss."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import belady
from belady.ir.trace import Tier
from tests.parity.test_models import expected, train, train_at_the_floor
from tests.support import training as steps
from tests.support.models import GPT, VOCABULARY, SmallGPT, Task
from tests.support.training import Step, Training, at_tight_budget, plain

# Classes, of which the data name few: logits are the largest tensor.
WIDE = 1024


class Scoring(SmallGPT):
    """Computes the loss of the next token itself, as models of Hugging Face do."""

    def __init__(self, sliced: bool) -> None:
        super().__init__()
        self.sliced = sliced
        self.embedding = nn.Embedding(WIDE, 32)
        self.head = nn.Linear(32, WIDE, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.blocks(self.embedding(tokens) + self.position))[:, :-1]
        if self.sliced:
            return belady.cross_entropy(hidden, self.head.weight, tokens[:, 1:], slices=4)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())


def own(loss: Tensor, _: Tensor) -> Tensor:
    return loss


WHOLE = Task("whole", lambda: [Scoring(False)], GPT.batch, own)
SLICED = Task("sliced", lambda: [Scoring(True)], GPT.batch, own)


@pytest.mark.parametrize("policy", ["auto", "floor"])
def test_the_engine_changes_no_bit(policy: str, device: str) -> None:
    run = at_tight_budget(lambda budget: train(SLICED, plain, policy, budget, device), device)
    assert run.plan.decisions or device == "cuda"


@pytest.mark.parametrize("step", [steps.autocast, steps.twice_backward])
def test_habit_of_training_changes_no_bit(step: Step, device: str) -> None:
    train_at_the_floor(SLICED, step, device)


def test_training_goes_the_same_way_as_with_all_logits(device: str) -> None:
    whole, sliced = (expected(task, plain, device) for task in (WHOLE, SLICED))
    for name in whole:
        if name.startswith("loss"):
            torch.testing.assert_close(whole[name], sliced[name], rtol=1e-4, atol=0)


def test_measured_peak_is_the_planned_peak_and_lower() -> None:
    peaks = []
    for task in (WHOLE, SLICED):
        run = train_at_the_floor(task, plain, "cpu")
        assert run.measured is not None
        assert run.measured.peak(Tier.DEVICE) == run.plan.predicted_peak_bytes
        peaks.append(run.plan.predicted_peak_bytes)
    assert peaks[1] < peaks[0]


def test_a_loss_outside_of_the_model() -> None:
    losses = []
    for managed in (False, True):
        training = Training(GPT)
        model = training.model
        weight = model.head.weight
        model.head = nn.Identity()
        vm = belady.virtualize(model, "1GiB", policy="floor") if managed else None
        with vm or contextlib.nullcontext():
            for index in range(4):
                x, y = training.batch(index)
                with vm.iteration() if vm else contextlib.nullcontext():
                    loss = belady.cross_entropy(model(x), weight, y)
                    loss.backward()
                    training.optimizer.step()
                    training.optimizer.zero_grad()
                losses.append(loss.item())
    assert losses[:4] == losses[4:]
    assert weight.shape == (VOCABULARY, 32)
