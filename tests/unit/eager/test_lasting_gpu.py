"""On a GPU gradients and optimizer state lie apart, and training comes out as in plain PyTorch."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import belady
from tests.support.segments import GENERAL, pool_of
from tests.support.training import differences, repeatable

pytestmark = pytest.mark.gpu

MIB = 2**20
WEIGHTS = 24 * MIB
BUDGET = 4096 * MIB
ITERATIONS = 6  # two observed, one that settles, two verified, one more
LARGE = ("enter.weight", "middle.weight", "leave.weight")


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with repeatable():
        yield
    torch.cuda.empty_cache()


class Wide(nn.Module):
    """Three large weights, 24 MiB in all unless ``width`` is another, and small biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(512, width)
        self.middle = nn.Linear(width, width)
        self.leave = nn.Linear(width, 512)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.middle(torch.tanh(self.enter(x)))))


class Run:
    """A model that is trained, and where what lasts was lying before each step."""

    def __init__(
        self, width: int = 2048, make: type[torch.optim.Optimizer] = torch.optim.AdamW
    ) -> None:
        torch.manual_seed(0)
        self.model = Wide(width).cuda()
        self.optimizer = make(self.model.parameters(), lr=1e-3)  # type: ignore[call-arg]
        self.losses: list[Tensor] = []
        self.pools: list[dict[str, tuple[int, int]]] = []

    def train(self, *, set_to_none: bool = True, parts: int = 1) -> Run:
        for index in range(ITERATIONS):
            for part in range(parts):
                generator = torch.Generator().manual_seed(10 * index + part)
                x = torch.randn(1024, 512, generator=generator).cuda()
                loss = self.model(x).square().mean()
                loss.backward()
                self.losses.append(loss.detach().clone())
            self.pools.append(self.gradient_pools())
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=set_to_none)
        # Gradients of one more, to be compared.
        self.model(torch.ones(4, 512, device="cuda")).sum().backward()
        return self

    def gradient_pools(self) -> dict[str, tuple[int, int]]:
        named = self.model.named_parameters()
        return {name: pool_of(p.grad) for name, p in named if p.grad is not None}

    def state_pools(self) -> dict[str, set[tuple[int, int]]]:
        state = self.optimizer.state
        return {
            name: {pool_of(state[p]["exp_avg"]), pool_of(state[p]["exp_avg_sq"])}
            for name, p in self.model.named_parameters()
        }

    def outcome(self) -> dict[str, Tensor]:
        found = {f"loss {i}": loss for i, loss in enumerate(self.losses)}
        for name, p in self.model.named_parameters():
            assert p.grad is not None
            found |= {name: p.detach().clone(), f"gradient {name}": p.grad.clone()}
            moments = {f"{k} {name}": v.clone() for k, v in self.optimizer.state[p].items()}
            found |= moments
        return found

    def hooks(self) -> int:
        return sum(len(p._post_accumulate_grad_hooks or ()) for p in self.model.parameters())


HABITS = {
    "gradients made anew": {"set_to_none": True},
    "gradients set to zero": {"set_to_none": False},
    "gradients added up": {"parts": 3},
}


@pytest.mark.parametrize("habit", HABITS.values(), ids=HABITS)
@pytest.mark.parametrize("policy", ["auto", "floor", "lifetime", "vdnn_all"])
def test_no_bit_changes(policy: str, habit: dict[str, int]) -> None:
    plain = Run().train(**habit).outcome()
    run = Run()
    with belady.virtualize(run.model, BUDGET, policy=policy):
        run.train(**habit)
    assert differences(plain, run.outcome()) == []


def test_gradients_and_state_lie_in_two_pools_of_their_own() -> None:
    run = Run()
    with belady.virtualize(run.model, BUDGET, policy="floor") as vm:
        run.train()
        state = run.state_pools()
        assert vm.verified
        made = vm.run()
    assert made is not None
    assert made.plan.decisions
    for pools in run.pools:
        assert {name for name, pool in pools.items() if pool != GENERAL} == set(LARGE)
        (of_gradients,) = {pools[name] for name in LARGE}
        (of_state,) = set().union(*(state[name] for name in LARGE))
        assert len({GENERAL, of_gradients, of_state}) == 3
    small = [pools for name, pools in state.items() if name not in LARGE]
    assert small == [{GENERAL}] * 3


def test_without_virtualize_all_lies_together() -> None:
    run = Run().train()
    assert {pool for pools in run.pools for pool in pools.values()} == {GENERAL}
    assert set().union(*run.state_pools().values()) == {GENERAL}


def test_where_nothing_moves_gradients_stay() -> None:
    run = Run()
    with belady.virtualize(run.model, BUDGET, policy="baseline"):
        run.train()
    # The plan is in force from the third iteration on.
    assert {pool for pools in run.pools[2:] for pool in pools.values()} == {GENERAL}


def test_before_a_plan_gradients_of_more_than_an_eighth_of_the_budget_stay() -> None:
    run = Run(6144, torch.optim.SGD)
    weights = sum(p.nbytes for p in run.model.parameters() if p.ndim == 2)
    assert weights == 168 * MIB
    with belady.virtualize(run.model, 8 * weights - 1, policy="floor"):
        run.train()
    # The plan is in force from the third iteration on.
    assert {pool for pools in run.pools[:2] for pool in pools.values()} == {GENERAL}


def test_after_close_nothing_is_left() -> None:
    run = Run()
    with belady.virtualize(run.model, BUDGET, policy="floor"):
        run.train()
        assert run.hooks() == len(LARGE)
    assert run.hooks() == 0
    run.optimizer.zero_grad()
    run.model(torch.ones(4, 512, device="cuda")).sum().backward()
    assert set(run.gradient_pools().values()) == {GENERAL}
    # Optimizer state lives on where it was put, and goes with its optimizer.
    pools = set().union(*(run.state_pools()[name] for name in LARGE))
    assert GENERAL not in pools
    before = torch.cuda.memory_reserved()
    del run
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before - 2 * WEIGHTS
