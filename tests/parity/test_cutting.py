"""A single op over the budget: `auto` runs modules in slices, and says so."""

from __future__ import annotations

import copy
import functools
import logging
import pickle
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import belady
from belady.errors import InfeasibleBudgetError
from belady.forwards import plain_forward
from belady.ir.run import Run
from belady.ir.trace import Tier
from belady.sections import cutting
from belady.sections.call import SlicedCall
from tests.support.models import Task
from tests.support.training import Training, footprint, plain

MIB = 1 << 20
ITERATIONS = range(5)


class Wide(nn.Module):
    """What its first convolutions need at once is most of what the rest needs in all."""

    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(inplace=True),
            *between,
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(4),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(4),
        )
        self.head = nn.Linear(16 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1))


class Gated(nn.Module):
    """Has a forward of its own, as the MLP of most language models."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 512)
        self.up = nn.Linear(16, 512)
        self.down = nn.Linear(512, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Scaled(Gated):
    """Is called with more than one tensor."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, scale=0.5)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 512), nn.GELU(), nn.Linear(512, 16), nn.Dropout(0.1))


class Feedforward(nn.Module):
    """The part of a transformer's block whose middle is the largest tensor."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mlp = mlp
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.mlp(self.norm(x))).mean(1))


def sequences(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, 10, (size,), generator=generator)
    return torch.randn(size, 64, 16, generator=generator), labels


def images(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, 10, (size,), generator=generator)
    return torch.randn(size, 3, 64, 64, generator=generator), labels


def precise_images(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    numbers, labels = images(size, generator)
    return numbers.double(), labels


WIDE = Task("wide", lambda: [Wide()], images)
CHAIN = Task(
    "chain", lambda: [nn.Sequential(*Wide().features, nn.Flatten(1), nn.Linear(256, 10))], images
)
# AdamW makes of a gradient near zero a whole step, and so of its rounding: not of this one's.
DROPPING = Task("wide with dropout", lambda: [Wide(nn.Dropout(0.2)).double()], precise_images)

TOKENS = Task("tokens", lambda: [Feedforward(perceptron())], sequences)
SCALED = Task("tokens with an argument", lambda: [Feedforward(Scaling())], sequences)
GATED = Task("tokens with a gate", lambda: [Feedforward(Gated())], sequences)


@functools.cache
def needed(policy: str, exact: bool = False, task: Task = WIDE) -> int:
    """Smallest budget that a refusal names."""
    training = Training(task)
    vm = belady.virtualize(training.models, MIB, policy=policy, exact=exact)
    with vm, pytest.raises(InfeasibleBudgetError) as caught:
        training.loss(0)
    return caught.value.smallest_bytes


def trained(
    budget: int, policy: str, task: Task, iterations: range = ITERATIONS
) -> tuple[Training, Run]:
    training = Training(task)
    with belady.virtualize(training.models, budget, policy=policy) as vm:
        training.run(plain, iterations)
        run = vm.run()
        assert re.search(r"(features|mlp)(\.\d to \1\.\d)? runs? in", vm.report())
    assert run is not None
    return training, run


@pytest.mark.parametrize(
    ("policy", "task"),
    [
        ("auto", WIDE),
        ("tvdnn_greedy", WIDE),
        ("tvdnn_ilp", WIDE),
        ("vdnn_all", WIDE),
        ("vdnn_conv", WIDE),
        ("vdnn_dyn", WIDE),
        ("auto", DROPPING),
        ("auto", TOKENS),
        ("auto", GATED),
    ],
    ids=str,
)
def test_a_budget_below_one_op_trains_in_slices(policy: str, task: Task) -> None:
    budget = int(needed("floor", task=task) * 0.6)
    training, run = trained(budget, policy, task)
    expected = Training(task).run(plain, ITERATIONS)
    for name, tensor in expected.model.state_dict().items():
        torch.testing.assert_close(training.model.state_dict()[name], tensor)
    for one, two in zip(training.losses, expected.losses, strict=True):
        torch.testing.assert_close(one, two)
    assert run.measured is not None
    assert run.measured.peak(Tier.DEVICE) <= budget
    assert run.measured.defaults == ()
    assert run.plan.numerics == ("sections",)


def test_a_refusal_with_slices_says_what_it_says_without() -> None:
    budget = int(needed("ocdnn_opt", exact=True) * 0.3)
    training = Training(WIDE)
    vm = belady.virtualize(training.models, budget, policy="ocdnn_opt")
    with vm, pytest.raises(InfeasibleBudgetError) as caught:
        training.loss(0)
    notes = "\n".join(caught.value.__notes__)
    assert "modules in slices" in notes
    assert "moves nothing here" in notes


def test_what_was_cut_too_coarsely_trains_in_finer_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    observed = iter([2 * MIB])
    monkeypatch.setattr(cutting, "over_budget", lambda *_: next(observed, 0))
    training, run = trained(int(needed("floor") * 0.6), "auto", WIDE, range(9))
    assert list(observed) == []
    expected = Training(WIDE).run(plain, range(9))
    for name, tensor in expected.model.state_dict().items():
        torch.testing.assert_close(training.model.state_dict()[name], tensor)
    assert run.plan.numerics == ("sections",)
    assert run.measured is not None


def test_what_an_optimizer_does_not_keep_lets_modules_run_in_fewer_slices(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def trained(budget: int | None) -> list[Tensor]:
        torch.manual_seed(0)
        convolve = nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)
        features = nn.Sequential(*convolve, nn.MaxPool2d(4))
        model = nn.Sequential(features, nn.Flatten(), nn.Linear(2048, 256))
        x, y, steps = torch.rand(32, 3, 32, 32), torch.randint(0, 64, (32,)), 5
        updates, losses = torch.optim.SGD(model.parameters(), lr=0.01), []
        with nullcontext() if budget is None else belady.virtualize(model, budget) as vm:
            for _ in range(steps):
                losses.append(F.cross_entropy(model(x), y))
                losses[-1].backward()
                updates.step()
                updates.zero_grad()
            assert vm is None or "in 4 slices" in vm.report()
        return losses

    with caplog.at_level(logging.INFO, "belady"):
        losses = trained(10 * MIB)
    assert caplog.text.count("found slices") == 2
    torch.testing.assert_close(losses, trained(None))


def test_other_shapes_are_cut_anew_before_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    observed = iter([0, 2 * MIB])
    monkeypatch.setattr(cutting, "over_budget", lambda *_: next(observed, 0))
    training = Training(WIDE)
    features = training.model.get_submodule("features")
    with belady.virtualize(training.models, int(needed("floor") * 0.6)):
        for index in range(4):
            for size in (8, 9):
                x, y = training.batch(index, size)
                loss = training.task.loss(training.model(x), y)
                assert "forward" in vars(features)
                loss.backward()
                training.optimizer.step()
                training.optimizer.zero_grad()
    assert list(observed) == []


def test_the_first_call_of_a_root_that_is_cut_itself_runs_in_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sliced: list[int] = []
    run = SlicedCall.run

    def counted(self: SlicedCall, whole: Tensor) -> Tensor:
        sliced.append(len(whole))
        return run(self, whole)

    monkeypatch.setattr(SlicedCall, "run", counted)
    training = Training(CHAIN)
    batch = len(training.batch(0)[0])
    with belady.virtualize(training.models, int(needed("floor", task=CHAIN) * 0.6)) as vm:
        sliced.clear()
        training.run(plain, [0])
        # Before that a few samples were tried.
        assert sliced[-1] == batch
        training.run(plain, range(1, 5))
        assert "slices along the batch" in vm.report()
        alone = pickle.loads(pickle.dumps(training.model))
    expected = Training(CHAIN).run(plain, range(5))
    for name, tensor in expected.model.state_dict().items():
        torch.testing.assert_close(training.model.state_dict()[name], tensor)
    for model in (training.model, alone):
        assert vars(model).get("forward", plain_forward(model)) == plain_forward(model)
    assert "forward" not in vars(training.model)


def test_what_is_called_with_more_than_one_tensor_runs_as_it_is_called() -> None:
    training = Training(SCALED)
    with belady.virtualize(training.models, int(needed("floor", task=SCALED) * 0.6)) as vm:
        training.run(plain, range(3))
        assert "Note: mlp.inner runs in" in vm.report()


@pytest.mark.parametrize("policy", ["auto", "tvdnn_greedy"])
def test_only_plans_of_roots_in_slices_say_that_numbers_differ(policy: str) -> None:
    training = Training(WIDE)
    small = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    descent = torch.optim.SGD(small.parameters(), 0.1)
    numerics = []
    with belady.virtualize(
        [training.model, small], int(needed("floor") * 0.6), policy=policy
    ) as vm:
        for index in ITERATIONS:
            training.run(plain, [index])
            numerics.append(numerics_of(vm))
            small(torch.ones(8, 64)).mean().backward()
            descent.step()
            descent.zero_grad()
            numerics.append(numerics_of(vm))
    assert numerics[-2:] == [("sections",), ()]


def numerics_of(vm: belady.VirtualMemory) -> tuple[str, ...] | None:
    run = vm.run()
    return None if run is None else run.plan.numerics


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_model_in_slices_is_cut_as_well(
    copied: Callable[[nn.Module], nn.Module],
) -> None:
    budget = int(needed("floor") * 0.6)
    training = Training(WIDE)
    with belady.virtualize(training.models, budget):
        training.run(plain, range(1))
        twin = copied(training.model)
    with belady.virtualize(twin, budget) as vm:
        for index in range(3):
            x, y = training.batch(index)
            training.task.loss(twin(x), y).backward()
            twin.zero_grad()
        assert numerics_of(vm) == ("sections",)


def test_afterwards_everything_is_as_it_was() -> None:
    budget = int(needed("floor") * 0.6)
    training = Training(WIDE).run(plain, range(1))
    before = footprint(training.model.modules())
    names = list(training.model.state_dict())
    with belady.virtualize(training.models, budget):
        training.run(plain, range(3))
        assert list(training.model.state_dict()) == names
    assert footprint(training.model.modules()) == before
    assert all("forward" not in vars(module) for module in training.model.modules())


@pytest.mark.parametrize(("policy", "exact"), [("lifetime", False), ("auto", True)])
def test_nobody_else_cuts(policy: str, exact: bool) -> None:
    budget = int(needed("floor") * 0.6)
    training = Training(WIDE)
    vm = belady.virtualize(training.models, budget, policy=policy, exact=exact)
    with vm, pytest.raises(InfeasibleBudgetError):
        training.loss(0)


def test_a_last_batch_that_is_smaller_trains_too() -> None:
    training = Training(WIDE)
    expected = Training(WIDE)
    with belady.virtualize(training.models, int(needed("floor") * 0.6)):
        for each in (training, expected):
            for size in (8, 8, 8, 5, 8, 5, 1, 5):
                loss = each.loss(0, size)
                loss.backward()
                each.optimizer.step()
                each.optimizer.zero_grad()
                each.losses.append(loss.detach())
    for one, two in zip(training.losses, expected.losses, strict=True):
        torch.testing.assert_close(one, two)


class Changing(nn.Module):
    """Treats samples by themselves until something says otherwise."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.mixes = False

    def forward(self, x: Tensor) -> Tensor:
        now = {"mode": self.training, "size": len(x) > 9, "flag": self.mixes}[self.when]
        return x - x.mean(0, keepdim=True) if now else x * 1.0


def changing(when: str) -> Task:
    def make() -> list[nn.Module]:
        model = Wide(Changing(when))
        return [model.eval() if when == "mode" else model]

    return Task(f"wide, changing by {when}", make, images)


def changed(training: Training, when: str) -> int:
    """Let samples mix from now on; gives the size of the batch."""
    if when == "mode":
        training.model.train()
    for module in training.model.modules():
        if isinstance(module, Changing):
            module.mixes = True
    return 10 if when == "size" else 8


def steps(training: Training, indices: range, size: int) -> list[list[Tensor]]:
    gradients = []
    for index in indices:
        x, y = training.batch(index, size)
        torch.manual_seed(index)
        training.task.loss(training.model(x), y).backward()
        gradients.append(
            [p.grad.clone() for p in training.model.parameters() if p.grad is not None]
        )
        training.optimizer.step()
        training.optimizer.zero_grad()
    return gradients


@pytest.mark.parametrize("when", ["mode", "size", "flag"])
def test_what_may_no_longer_be_cut_is_not(when: str) -> None:
    task = changing(when)
    plainly = Training(task)
    expected = steps(plainly, range(3), 8)
    expected += steps(plainly, range(3, 5), changed(plainly, when))
    training = Training(task)
    budget = int(needed("floor", task=task) * 0.6)
    found = []
    with belady.virtualize(training.models, budget) as vm:
        found += steps(training, range(3), 8)
        assert "slices along the batch" in vm.report()
        size = changed(training, when)
        # What mixes, and what is before and after it, may be too large as a whole.
        with suppress(InfeasibleBudgetError):
            found += steps(training, range(3, 5), size)
    assert len(found) >= 3
    for one, two in zip(found, expected, strict=False):
        for mine, theirs in zip(one, two, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-6)


def test_each_kind_of_call_has_sections_of_its_own() -> None:
    plainly, training = Training(DROPPING), Training(DROPPING)
    sizes = [8, 2, 8, 9, 2, 8]
    budget = int(needed("floor", task=DROPPING) * 0.6)
    expected = [steps(plainly, range(i, i + 1), size) for i, size in enumerate(sizes)]
    features = training.model.get_submodule("features")
    cut = []
    with belady.virtualize(training.models, budget):
        for i, size in enumerate(sizes):
            found = steps(training, range(i, i + 1), size)
            cut.append("forward" in vars(features))
            for mine, theirs in zip(found[0], expected[i][0], strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-6)
    # A small batch fits as it is, bit for bit.
    assert cut == [True, False, True, True, False, True]


def test_a_later_pass_of_another_shape_is_judged_too() -> None:
    expected, training = Training(WIDE), Training(WIDE)
    budget = int(needed("floor") * 0.6)
    with belady.virtualize(training.models, budget) as vm:
        for index in range(9):
            for it in (expected, training):
                for size in (2, 8):
                    x, y = it.batch(index, size)
                    it.task.loss(it.model(x), y).backward()
                it.optimizer.step()
                it.optimizer.zero_grad()
        assert "slices along the batch" in vm.report()
    for name, tensor in expected.model.state_dict().items():
        found = training.model.state_dict()[name]
        torch.testing.assert_close(found, tensor, rtol=1e-3, atol=1e-4)


class Heavy(Wide):
    """Of its parameters Adam keeps more than all else needs beside the largest op."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 10))


def test_what_fits_but_not_beside_the_optimizers_state_is_cut() -> None:
    heavy = Task("heavy", lambda: [Heavy()], images)
    kept = sum(it.nbytes for it in Training(heavy).model.parameters())
    # What is named, without slices, has room for two copies; the first call needs none.
    training, _ = trained(needed("auto", True, heavy) - kept, "auto", heavy, range(10))
    expected = Training(heavy).run(plain, range(10))
    for name, tensor in expected.model.state_dict().items():
        torch.testing.assert_close(training.model.state_dict()[name], tensor)


def test_a_refusal_says_why_modules_are_not_in_slices() -> None:
    training = Training(WIDE)
    hooked = training.model.get_submodule("features.1")
    hooked.register_forward_hook(lambda *_: None)
    with (
        belady.virtualize(training.models, int(needed("floor") * 0.4)),
        pytest.raises(InfeasibleBudgetError) as caught,
    ):
        training.run(plain, range(3))
    assert any("has hooks" in note for note in caught.value.__notes__)


def in_eval(mixing: nn.Module) -> Task:
    return Task("mixing in training", lambda: [Wide(mixing).eval()], images)


MIXING = in_eval(Changing("mode"))


def gradients(training: Training, run: Callable[[Tensor], Tensor], size: int) -> list[Tensor]:
    """Of a small call in training mode, which fits whole, and in which samples mix."""
    training.model.train()
    x, _ = training.batch(0, size)
    run(x).sum().backward()
    training.model.eval()
    found = [p.grad.clone() for p in training.model.parameters() if p.grad is not None]
    training.optimizer.zero_grad()
    return found


def by_itself(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return model.get_submodule("features")


def without_hooks(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return model.forward


def on_a_thread(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: model(x)).result()

    return run


def as_usual(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return model


@pytest.mark.parametrize("how", [by_itself, without_hooks, on_a_thread, as_usual])
def test_only_a_call_that_was_judged_runs_in_slices(
    how: Callable[[nn.Module], Callable[[Tensor], Tensor]],
) -> None:
    plainly, training = Training(MIXING), Training(MIXING)
    expected = gradients(plainly, how(plainly.model), 3)
    with belady.virtualize(training.models, int(needed("floor", task=MIXING) * 0.6)):
        x, y = training.batch(0)
        training.task.loss(training.model(x), y).backward()
        training.optimizer.zero_grad()
        assert "forward" in vars(training.model.get_submodule("features"))
        found = gradients(training, how(training.model), 3)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_later_call_in_a_whole_iteration_is_judged_too() -> None:
    plainly, training = Training(MIXING), Training(MIXING)
    expected = gradients(plainly, plainly.model, 3)
    with belady.virtualize(training.models, int(needed("floor", task=MIXING) * 0.6)) as vm:
        for _ in range(3):
            with vm.iteration():
                x, y = training.batch(0)
                training.task.loss(training.model(x), y).backward()
                training.optimizer.zero_grad()
                found = gradients(training, training.model, 3)
            for mine, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, theirs)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


def test_roots_that_share_modules_do_not_run_in_the_sections_of_each_other() -> None:
    plainly, training = Training(MIXING), Training(MIXING)
    outer = [Outer(it.model) for it in (plainly, training)]
    expected = gradients(plainly, outer[0], 3)
    budget = int(needed("floor", task=MIXING) * 0.6)
    with belady.virtualize([outer[1], training.model], budget):
        for root in (training.model, outer[1], training.model):
            x, y = training.batch(0)
            training.task.loss(root(x), y).backward()
            training.optimizer.zero_grad()
            found = gradients(training, outer[1], 3)
            for mine, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, theirs)


def test_a_small_batch_fits_where_large_ones_had_to_be_cut() -> None:
    heavy = Task("heavy", lambda: [Heavy()], images)
    kept = sum(it.nbytes for it in Training(heavy).model.parameters())
    training, expected = Training(heavy), Training(heavy)
    sizes = [8] * 8 + [2, 8]
    with belady.virtualize(training.models, needed("auto", True, heavy) - kept):
        for index, size in enumerate(sizes):
            for it in (training, expected):
                steps(it, range(index, index + 1), size)
    for name, tensor in expected.model.state_dict().items():
        found = training.model.state_dict()[name]
        torch.testing.assert_close(found, tensor, rtol=1e-3, atol=1e-4)
