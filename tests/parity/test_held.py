"""What is held before the first iteration leaves less room, and is known before anything runs."""

from __future__ import annotations

import gc
import traceback
import weakref

import pytest
import torch
from torch import nn

import belady
from belady.eager import admission
from belady.errors import InfeasibleBudgetError
from belady.ir.run import Run
from belady.measure.held import gradient_bytes, taken_bytes
from belady.sections.choice import Beside
from belady.sections.cutting import Cutting
from belady.units import parse_bytes
from tests.parity.test_cutting import MIB, WIDE, needed, trained
from tests.support.training import Training, plain


def taken(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(admission, "taken_bytes", lambda *_: nbytes)


def test_what_fits_but_for_what_is_held_is_refused_or_runs_in_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = needed("floor")
    taken(monkeypatch, budget // 2)
    refused = Training(WIDE)
    with (
        belady.virtualize(refused.models, budget, policy="lifetime"),
        pytest.raises(InfeasibleBudgetError) as caught,
    ):
        refused.loss(0)
    assert caught.value.smallest_bytes > budget
    training, run = trained(budget, "auto", WIDE, range(4))
    assert run.plan.numerics == ("sections",)
    expected = Training(WIDE).run(plain, range(4))
    for name, tensor in expected.model.state_dict().items():
        torch.testing.assert_close(training.model.state_dict()[name], tensor)


def test_what_a_call_shows_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(WIDE)
    x, _ = training.batch(0)
    weights = sum(it.nbytes for it in training.model.parameters())
    budget = needed("lifetime") + 2 * weights
    taken(monkeypatch, weights + x.nbytes)
    with belady.virtualize(training.models, budget, policy="lifetime") as vm:
        training.run(plain, range(3))
        assert isinstance(vm.run(), Run)


def test_a_refusal_names_what_slices_would_need_and_they_do() -> None:
    training = Training(WIDE)
    with (
        belady.virtualize(training.models, MIB),
        pytest.raises(InfeasibleBudgetError) as caught,
    ):
        training.loss(0)
    least = caught.value.smallest_bytes
    assert least < 0.8 * needed("floor")
    assert f"the smallest feasible budget of this policy is {least} bytes" in str(caught.value)
    *_, note = caught.value.__notes__
    assert note.startswith(f"{least} bytes are enough for modules in slices")
    assert f"plain PyTorch {needed('auto', True)} are needed" in note
    _, run = trained(least, "auto", WIDE, range(3))
    assert run.plan.numerics == ("sections",)


def test_what_is_held_may_be_gone_when_a_refused_call_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training, budget = Training(WIDE), needed("lifetime")
    held = [budget, 0, budget]
    monkeypatch.setattr(admission, "taken_bytes", lambda *_: held.pop(0))
    with belady.virtualize(training.models, budget, policy="lifetime") as vm:
        with pytest.raises(InfeasibleBudgetError):
            training.loss(0)
        training.run(plain, range(3))
        assert isinstance(vm.run(), Run)
    # Once that has run it is not asked again: the engine holds memory of its own.
    assert held == [budget]


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_nobody_holds_the_batch_of_a_call_that_was_refused(engine: str) -> None:
    training = Training(WIDE)
    x, _ = training.batch(0)
    x = x.clone()
    alive = weakref.ref(x)
    with (
        belady.virtualize(training.models, MIB // 4, engine=engine),
        pytest.raises(InfeasibleBudgetError) as caught,
    ):
        training.model(x)
    del x
    traceback.clear_frames(caught.tb)
    del caught
    gc.collect()
    assert alive() is None


def test_nobody_holds_the_batch_for_which_no_slices_were_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Cutting, "lacks_workspaces", lambda *_: True)
    monkeypatch.setattr(Beside, "chosen", lambda *_: None)
    training = Training(WIDE)
    x, y = training.batch(0)
    x = x.clone()
    alive = weakref.ref(x)
    with belady.virtualize(training.models, "1GiB"):
        training.task.loss(training.model(x), y).backward()
        training.optimizer.step()
        del x
        gc.collect()
        assert alive() is None


def test_gradients_are_counted_by_what_they_lie_in() -> None:
    device = torch.device("cpu")
    flat = torch.zeros(1000)
    apart = nn.Linear(10, 10)
    apart.weight.grad = flat[:100].view(10, 10)
    apart.bias.grad = flat[100:110]
    table = nn.Embedding(8, 4, sparse=True)
    table(torch.tensor([1])).sum().backward()
    assert gradient_bytes([apart, table, nn.Linear(3, 3)], device) == flat.nbytes


@pytest.mark.gpu
def test_an_optimizer_that_has_stepped_is_known_before_anything_runs() -> None:
    device = torch.device("cuda", 0)
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    before = torch.cuda.memory_allocated()
    x = torch.randn(64, 2048, device=device)
    model(x).sum().backward()
    optimizer.step()
    weights = sum(it.nbytes for it in model.parameters())
    # Two copies; what cuBLAS has taken; and x. Not the gradients, which are there too.
    held = taken_bytes([model], device) - before
    assert 2 * weights <= held <= 2 * weights + parse_bytes("100MiB")
    optimizer.zero_grad()
    outputs: list[type] = []
    model[-1].register_forward_hook(lambda *given: outputs.append(type(given[-1])))
    budget = before + int(3.5 * weights)
    with belady.virtualize(model, budget), pytest.raises(InfeasibleBudgetError) as caught:
        model(x).sum().backward()
    assert torch.Tensor not in outputs  # but tensors without bytes
    # The step of Adam takes some for each parameter, of which no static trace knows.
    enough = int(1.1 * caught.value.smallest_bytes)
    with belady.virtualize(model, enough):
        for _ in range(3):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
