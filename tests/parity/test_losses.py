"""A loss that needs more than all else: `auto` makes it in slices, with the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import belady
from belady.ir.run import Run
from belady.ir.trace import Phase, Tier
from belady.sections import losses

KIB = 1 << 10
TOKENS, WIDTH, CLASSES = 96, 16, 2003
LOGITS = TOKENS * CLASSES * 4
PLAIN = F.cross_entropy


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(losses, "_LEAST_SLICE", 32 * KIB)
    yield
    assert F.cross_entropy is PLAIN


class Language(nn.Module):
    """Gives logits, or the loss itself where it is told the targets, as Hugging Face's models."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Embedding(CLASSES, WIDTH),
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)),
        )
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.head(self.body(tokens))
        return logits if targets is None else F.cross_entropy(logits, targets)


def train(
    budget: int | None, *, inside: bool, policy: str = "auto"
) -> tuple[list[Tensor], belady.VirtualMemory | None]:
    torch.manual_seed(0)
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters())
    vm = belady.virtualize(model, budget, policy=policy) if budget is not None else None
    found = []
    for _ in range(7):
        tokens = torch.randint(CLASSES, (TOKENS,))
        loss = model(tokens, tokens) if inside else F.cross_entropy(model(tokens), tokens)
        loss.backward()
        found += [
            loss.detach(),
            *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        ]
        optimizer.step()
        optimizer.zero_grad()
    return found, vm


@pytest.mark.parametrize("inside", [False, True])
def test_the_same_bits_within_less_than_the_logarithms(inside: bool) -> None:
    plain, _ = train(None, inside=inside)
    weights = (2 * CLASSES * WIDTH + 4 * WIDTH * (WIDTH + 1)) * 4
    # Parameters, gradients and Adam's two; logits and their gradient; a little beside.
    budget = 4 * weights + int(2.5 * LOGITS)
    found, vm = train(budget, inside=inside)
    assert vm is not None
    with vm:
        run = vm.run()
        assert run is not None
        assert run.measured is not None
        assert run.measured.peak(Tier.DEVICE) <= budget
        assert any("cross_entropy runs in slices of rows" in note for note in run.notes)
        assert run.plan.numerics == ()
        slices = [op for op in run.trace.ops if op.name.startswith("aten._log_softmax.")]
        assert len(slices) > 4
        assert {op.phase for op in slices} == {
            Phase.FORWARD if inside else Phase.LOSS,
            Phase.BACKWARD,
        }
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


def test_where_everything_fits_nothing_is_changed() -> None:
    plain, _ = train(None, inside=False)
    found, vm = train(64 * LOGITS, inside=False)
    assert vm is not None
    with vm:
        run = vm.run()
        assert run is not None
        assert not any("cross_entropy" in note for note in run.notes)
        assert PLAIN is F.cross_entropy
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


def test_the_founders_policies_have_losses_as_they_are() -> None:
    _, vm = train(10 * LOGITS, inside=False, policy="vdnn_all")
    assert vm is not None
    with vm:
        assert PLAIN is F.cross_entropy


@pytest.mark.parametrize("engine", ["graph", "inductor"])
def test_captured_graphs_have_their_losses_in_slices(engine: str) -> None:
    def losses(budget: int | None) -> tuple[list[Tensor], list[Tensor], Run | None]:
        torch.manual_seed(0)
        model = Language()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        vm = None
        if budget is not None:
            vm = belady.virtualize(model, budget, engine=engine)
        found = []
        for _ in range(7):
            tokens = torch.randint(CLASSES, (TOKENS,))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens), tokens)
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        if vm is None:
            return found, [p.detach() for p in model.parameters()], None
        with vm:
            assert F.cross_entropy is not PLAIN
            return found, [p.detach() for p in model.parameters()], vm.run()

    plain, weights, _ = losses(None)
    found, trained, run = losses(3 * LOGITS)
    assert run is not None
    assert any("cross_entropy runs in slices of rows" in note for note in run.notes)
    assert found[0] == plain[0]
    if engine == "graph":
        assert all(map(torch.equal, [*plain, *weights], [*found, *trained]))


def test_a_loss_that_is_captured_is_captured_once_and_left_as_it_is() -> None:
    torch.manual_seed(0)
    model = Language()
    captured = torch._dynamo.utils.counters["stats"]
    before = captured["unique_graphs"]
    with belady.virtualize(model, 4 * LOGITS, engine="graph"):
        for _ in range(4):
            tokens = torch.randint(CLASSES, (TOKENS,))
            model(tokens, tokens).backward()
        assert F.cross_entropy is PLAIN
    assert captured["unique_graphs"] == before + 1
