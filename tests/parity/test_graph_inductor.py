"""Inductor's kernels between movements: the numbers of plain PyTorch but for rounding."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config
from torch._subclasses import FakeTensorMode
from torch.nn import functional

import belady
import tests.parity.graphs as graphs
from belady.errors import InfeasibleBudgetError
from belady.graph import capture, inductor, program
from belady.graph.replays import from_statistics
from belady.graph.session import Session
from belady.ir.plan import Plan
from belady.ir.run import Run
from belady.ir.trace import Trace
from tests.parity.graphs import PlannedHost, compiled
from tests.parity.racing import hostile_carrier, random_plan
from tests.parity.test_graph_shortcuts import LAST, NORMS, made_again
from tests.support.models import CNN, Task
from tests.support.training import Step, Training, autocast, plain

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="Inductor needs a C++ compiler")

BATCH, WIDTH = 32, 64
CLASSES = 4_099
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    # In this process: workers that compile beside it would outlive the test. Code is written anew
    # each time; what a compiler makes of the same code torch keeps, for the next run too.
    with config.patch({"compile_threads": 1, "fx_graph_cache": False}):
        yield
    torch._dynamo.reset()


class Fused(nn.Module):
    """Views, a tuple, a random op between fused ones, and what backward reads of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH // 2, 10)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)).exp() + x
        x = self.dropout(x)
        left, right = torch.nn.functional.layer_norm(x, (WIDTH,)).chunk(2, 1)
        return self.second(torch.sigmoid(left) * right.relu())


def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, WIDTH, generator=generator)
    return x, torch.randint(10, (size,), generator=generator)


FUSED = Task("fused", lambda: [Fused()], batch)


def at_random(trace: Trace) -> Plan:
    return random_plan(trace, "threads", 2)


def gradients(training: Training) -> list[Tensor]:
    torch.manual_seed(3)
    loss = training.loss(0, BATCH)
    return [loss, *torch.autograd.grad(loss, list(training.models[0].parameters()))]


@pytest.mark.slow
def test_segments_compute_what_plain_pytorch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []

    def fuse(module: fx.GraphModule, fakes: Sequence[Any]) -> Any:
        kernel = inductor.compiled(module, fakes)
        assert kernel is not None

        def run(given: list[Any]) -> Any:
            made = kernel(given)
            left.append(len(given))
            return made

        return run

    def programs(*given: Any) -> program.Program:
        return program.program_of(*given, fuse=fuse)

    monkeypatch.setattr(graphs, "program_of", programs)
    expected, training = gradients(Training(FUSED)), Training(FUSED)
    parameters = list(training.models[0].parameters())
    carrier = hostile_carrier("threads")
    host = PlannedHost(training.models, carrier, at_random)
    try:
        with compiled(training, host):
            torch.manual_seed(3)
            loss = training.loss(0, BATCH)
            found = [loss, *torch.autograd.grad(loss, parameters)]
    finally:
        carrier.close()
    assert host.plans[0].decisions
    # Nobody but the kernels holds what goes into them.
    assert left == [0] * len(left) != []
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_it_trains_within_a_budget_and_says_that_bits_can_change() -> None:
    expected, training = Training(FUSED).run(plain, range(4)), Training(FUSED)
    with belady.virtualize(training.models, "1GiB", engine="inductor") as vm:
        training.run(plain, range(4))
    run = vm.run()
    assert run is not None
    assert run.plan.numerics == ("inductor",)
    assert run.notes == ()
    assert "Can change a bit of the result: inductor" in vm.report()
    torch.testing.assert_close(training.losses, expected.losses, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        list(training.model.parameters()), list(expected.model.parameters()), rtol=1e-2, atol=1e-3
    )


def deep() -> nn.Module:
    """Without dropout: Inductor draws other numbers than plain PyTorch."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def farthest(model: nn.Module, exact: list[Tensor]) -> float:
    """Largest distance of a gradient from the exact one, as a part of its largest number."""
    found = [it.grad.double() for it in model.parameters() if it.grad is not None]
    assert len(found) == len(exact)
    return max(
        float((mine - true).abs().max() / true.abs().max())
        for mine, true in zip(found, exact, strict=True)
    )


@pytest.mark.slow
def test_with_little_memory_it_is_as_near_to_exact_as_inductor_by_itself() -> None:
    x = torch.randn(1024, WIDTH, generator=torch.Generator().manual_seed(1))
    true, alone, ours = deep().double(), deep(), deep()
    true(x.double()).square().sum().backward()
    exact = [it.grad for it in true.parameters() if it.grad is not None]
    torch.compile(alone, backend="inductor")(x).square().sum().backward()
    with pytest.raises(InfeasibleBudgetError) as refused, belady.virtualize(ours, 4096) as vm:
        ours(x)
    budget = int(1.2 * refused.value.smallest_bytes)
    with belady.virtualize(ours, budget, engine="inductor") as vm:
        for _ in range(6):
            ours.zero_grad()
            ours(x).square().sum().backward()
        run = vm.run()
    assert run is not None
    assert len(run.plan.decisions) >= 4
    assert 0 < farthest(ours, exact) <= 2 * farthest(alone, exact)


def test_what_inductor_cannot_compile_runs_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no compiler on this machine\nand more")

    seamed: list[Plan] = []

    def at_seams(*given: Any) -> Plan:
        # Every plan goes through it before it is judged or carried out.
        seamed.append(replace(given[-1], planner="at seams"))
        return seamed[-1]

    monkeypatch.setattr(inductor, "compiled", fails)
    monkeypatch.setattr("belady.graph.planning.at_seams", at_seams)
    training = Training(CNN)
    with belady.virtualize(training.models, "1GiB", engine="inductor") as vm:
        training.run(plain, range(4))
        assert isinstance(vm._tracker.conductor, Session)
    run = vm.run()
    assert run is not None
    assert seamed
    assert run.plan.planner == "at seams"
    (note,) = run.notes
    assert note.endswith("no compiler on this machine")


@pytest.mark.gpu
@pytest.mark.parametrize("task", [NORMS, LAST], ids=str)
def test_norms_from_their_statistics_are_fused_with_what_is_around_them(
    task: Task, replaying: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_targets: list[Any] = []
    known = inductor.compiled

    def noted(module: fx.GraphModule, fakes: Sequence[Any]) -> Any:
        compiled_targets.extend(node.target for node in module.graph.nodes)
        return known(module, fakes)

    monkeypatch.setattr(inductor, "compiled", noted)
    found, expected, run = beside_plain(task, autocast, 6)
    assert not any("Inductor" in note for note in run.notes)
    assert any(run.trace.ops[op].shortcut is not None for op in made_again(run))
    assert from_statistics in compiled_targets
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def beside_plain(task: Task, step: Step, iterations: int) -> tuple[list[Tensor], list[Tensor], Run]:
    """Losses with Inductor's kernels, those of plain PyTorch on the same draws, and the run."""
    expected, training = Training(task, "cuda"), Training(task, "cuda")
    torch.cuda.manual_seed(7)
    expected.run(step, range(iterations))
    torch.cuda.manual_seed(7)
    with belady.virtualize(training.models, "1GiB", engine="inductor") as vm:
        training.run(step, range(iterations))
    run = vm.run()
    assert run is not None
    return training.losses, expected.losses, run


class Speaking(nn.Module):
    """Causal attention by a mask, dropout, and a head whose rows begin where no kernel is fast."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, 256)
        self.mixed, self.head = nn.Linear(256, 768), nn.Linear(256, CLASSES, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        query, key, value = self.mixed(x).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
        seen = torch.arange(tokens.shape[1], device=x.device)
        mask = (seen[:, None] >= seen[None]).expand(len(x), 1, -1, -1)
        found = functional.scaled_dot_product_attention(query, key, value, mask)
        return self.head(x + self.dropout(found.transpose(1, 2).flatten(2)))


def spoken(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(CLASSES, (size, 257), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def spoken_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())


def amid_nans(training: Training, index: int) -> list[Tensor]:
    """An iteration whose kernels find what is no number wherever they have not written yet."""
    blocks = [torch.full((9216,), torch.nan, device=training.device) for _ in range(200)]
    del blocks
    return autocast(training, index)


@pytest.mark.gpu
def test_kernels_that_read_what_they_have_written_wait_for_it(replaying: list[Plan]) -> None:
    found, expected, run = beside_plain(NORMS, amid_nans, 40)
    assert made_again(run)
    assert torch.stack(found).isfinite().all()
    torch.testing.assert_close(found[:6], expected[:6], rtol=2e-2, atol=2e-2)


class Modulated(nn.Module):
    """Norms with scales and shifts that are parts of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-0.5, 0.5, 4 * 1024).view(4, 1024))

    def forward(self, x: Tensor) -> Tensor:
        for scale, shift in self.table.chunk(2):
            x = functional.layer_norm(x, (1024,)) * (1 + scale) + shift
        return x


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_that_are_parts_of_one_are_all_written(device: str) -> None:
    generator = torch.Generator().manual_seed(2)
    x, wanted = (torch.randn(8192, 1024, generator=generator).to(device) for _ in range(2))

    def trained(model: nn.Module) -> Tensor:
        for _ in range(4):
            model.zero_grad()
            (model(x) - wanted).square().sum().backward()
        (parameter,) = model.parameters()
        assert parameter.grad is not None
        return parameter.grad

    expected, model = trained(Modulated().to(device)), Modulated().to(device)
    with belady.virtualize(model, "4GiB", engine="inductor") as vm:
        found = trained(model)
    run = vm.run()
    assert run is not None
    assert run.plan.numerics == ("inductor",)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-1)


@pytest.mark.parametrize(
    ("size", "joins", "apart"), [(6, True, True), (6, False, False), (1 << 15, True, False)]
)
def test_sums_along_two_dimensions_are_apart_where_they_are_joined(
    size: int, joins: bool, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def compile_(traced: fx.GraphModule, _: Any) -> fx.GraphModule:
        seen.append(config.triton.mix_order_reduction)
        return traced

    monkeypatch.setattr(inductor, "compile_fx_inner", compile_)
    graph = fx.Graph()
    x = graph.placeholder("x")
    parts = [graph.call_function(torch.ops.aten.sum.dim_IntList, (x, [dim])) for dim in (0, 1)]
    if joins:
        parts = [graph.call_function(torch.ops.aten.cat.default, (parts,))]
    graph.output(tuple(parts))
    module = fx.GraphModule({}, graph)
    with FakeTensorMode():
        given = torch.ones(size, size)
        for node, value in zip(parts, module(given), strict=True):
            node.meta["val"] = value
    with config.patch({"triton.mix_order_reduction": True}):
        assert inductor.compiled(module, [given]) is not None
        assert config.triton.mix_order_reduction
    assert seen == [not apart]


@pytest.mark.gpu
def test_masks_go_products_are_padded_and_dropout_draws_what_plain_pytorch_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    padded, targets = list[int](), list[Any]()
    align = capture.align

    def noted(joint: fx.GraphModule, budget_bytes: int) -> int:
        padded.append(align(joint, budget_bytes))
        targets.extend(node.target for node in joint.graph.nodes)
        return padded[-1]

    monkeypatch.setattr(capture, "align", noted)
    task = Task("speaking", lambda: [Speaking()], spoken, spoken_loss)
    found, expected, run = beside_plain(task, autocast, 6)
    assert not any("could not compile" in note for note in run.notes)
    assert 3 in padded
    attention = {str(it) for it in targets if "attention" in str(it)}
    assert attention
    assert not any("efficient" in name for name in attention)  # what flash takes no mask for
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
