"""A parameter used several times under autocast is cast once, its gradients added as plain does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import belady
from belady.errors import GraphError
from tests.parity.graphs import PlannedHost, compiled
from tests.parity.racing import hostile_carrier, random_plan
from tests.support.models import Task
from tests.support.training import Step, Training, autocast, differences, plain

WIDTH, CLASSES = 16, 5
ATEN = torch.ops.aten
# Of a graph break: what one graph gives the next is no leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def sequences(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    steps = torch.randn(size, 6, WIDTH, generator=generator)
    return steps, torch.randint(CLASSES, (size,), generator=generator)


class Shared(nn.Module):
    """One cell for all steps, whose weights are used twice as often as its biases."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, steps: Tensor) -> Tensor:
        hidden = carry = torch.zeros_like(steps[:, 0])
        for step in steps.unbind(1):
            hidden, carry = self.cell(self.mix(step), (hidden, carry))
            # Branches that join: the gradient of `mix` comes from later and earlier uses in turn.
            hidden = hidden + self.mix(carry).tanh() * nn.functional.linear(step, self.mix.weight)
        return self.head(hidden)


class RegionInside(Shared):
    """Autocast is the model's own affair, but for a part of it."""

    def forward(self, steps: Tensor) -> Tensor:
        with torch.autocast(steps.device.type, torch.bfloat16):
            found = super().forward(steps)
            with torch.autocast(steps.device.type, enabled=False):
                return found.float() * 2 + self.head(steps[:, 0])


class TwoRegions(Shared):
    """Each region casts the weight of ``mix``."""

    def forward(self, steps: Tensor) -> Tensor:
        with torch.autocast(steps.device.type, torch.bfloat16):
            steps = self.mix(steps)
        with torch.autocast(steps.device.type, torch.bfloat16):
            return super().forward(steps)


class CastsToo(Shared):
    """The user casts what autocast casts as well."""

    def forward(self, steps: Tensor) -> Tensor:
        weight = self.mix.weight.to(torch.bfloat16)
        return super().forward((steps.to(torch.bfloat16) @ weight).float())


class InACheckpoint(Shared):
    """Each block that is made again has a region of its own."""

    def block(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.mix(self.mix(self.mix(x).tanh()).tanh()).float()

    def forward(self, steps: Tensor) -> Tensor:
        for _ in range(2):
            steps = checkpoint(self.block, steps, use_reentrant=False)
        return self.head(steps.sum(1))


class TwiceInOneOp(Shared):
    """One op takes the weight twice, and hands two gradients over at once."""

    def forward(self, steps: Tensor) -> Tensor:
        weight = self.mix.weight
        square = weight @ weight
        once = nn.functional.linear(steps.sum(1), weight).tanh() @ square
        return self.head(nn.functional.linear(once, weight))


class PassedThrough(Shared):
    """The gradient of a summand was made long before it is handed over."""

    def forward(self, steps: Tensor) -> Tensor:
        weight, x = self.mix.weight, steps.sum(1)[:1].expand(WIDTH, WIDTH)
        mixed = self.mix(x)
        found = torch.addmm(weight, x, mixed) + torch.mm(x, weight) + torch.mm(mixed.tanh(), weight)
        return self.head(found[:8] + steps.sum(1))


class OtherDtypeInside(Shared):
    """Of a region inside another, with another precision."""

    def forward(self, steps: Tensor) -> Tensor:
        around = torch.autocast(steps.device.type, torch.bfloat16)
        with around, torch.autocast(steps.device.type, torch.float16):
            x = self.mix(self.mix(self.mix(steps).tanh()).tanh())
        return self.head(x.float().sum(1))


class NoCacheInside(Shared):
    """Of a region inside another, without the cache."""

    def forward(self, steps: Tensor) -> Tensor:
        with torch.autocast(steps.device.type, torch.bfloat16):
            x = self.mix(steps).tanh()
            with torch.autocast(steps.device.type, torch.bfloat16, cache_enabled=False):
                x = self.mix(self.mix(x).tanh())
        return self.head(x.float().sum(1))


class Decorated(Shared):
    """One region, which says of its cache what is so anyway."""

    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, steps: Tensor) -> Tensor:
        return super().forward(steps)


class InFloat32(Shared):
    """Products in float32 inside of a region: attention's own, and one with autocast off."""

    def forward(self, steps: Tensor) -> Tensor:
        x = self.mix(steps)
        x = nn.functional.scaled_dot_product_attention(x, x * 1.1, x * 0.9)
        with torch.autocast(steps.device.type, enabled=False):
            x = x.float() @ self.mix.bias.outer(self.mix.bias)
        return self.head(x.sum(1))


class CastByHand(Shared):
    """The user alone casts, twice: two copies of the weight, each with a gradient."""

    def forward(self, steps: Tensor) -> Tensor:
        first = steps.bfloat16() @ self.mix.weight.to(torch.bfloat16)
        second = first.tanh() @ self.mix.weight.to(torch.bfloat16)
        return self.head((second @ self.mix.weight.to(torch.bfloat16)).float().sum(1))


class InTwoGraphs(nn.Module):
    """What one graph uses another uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, steps: Tensor) -> Tensor:
        steps = self.mix(steps).relu()
        torch._dynamo.graph_break()
        return self.head((self.mix(steps).relu() + self.mix(steps * 2)).sum(1))


def without_cache(training: Training, index: int) -> list[Tensor]:
    """Every use is cast anew, in plain PyTorch too."""
    with torch.autocast(training.device, torch.bfloat16, cache_enabled=False):
        loss = training.loss(index)
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return [loss]


def task(model: Callable[[], nn.Module]) -> Task:
    return Task(model.__name__, lambda: [model()], sequences)


def outcome(
    of: Task, step: Step, kinds: list[str], device: str = "cpu"
) -> tuple[list[str], PlannedHost]:
    """What differs from plain PyTorch under random plans, and the host that carried them out."""
    expected = Training(of, device).run(step, range(len(kinds))).outcome()
    training = Training(of, device)
    carriers = [hostile_carrier(kind) for kind in kinds]
    host = PlannedHost(training.models, carriers[0], lambda trace: random_plan(trace, "direct", 0))
    try:
        with compiled(training, host):
            for seed, (kind, carrier) in enumerate(zip(kinds, carriers, strict=True)):
                host.replan(carrier, lambda trace, k=kind, s=seed: random_plan(trace, k, s))
                training.run(step, [seed])
    finally:
        for carrier in carriers:
            carrier.close()
    return differences(expected, training.outcome()), host


def casts_of(host: PlannedHost) -> list[fx.Node]:
    """Casts of inputs of the one graph that was captured."""
    (joint,) = {id(part.joint): part.joint for it in host.drawn for part in it.parts}.values()
    steps = [step.node for step in joint.forward]
    casts = [node for node in steps if node.target is ATEN._to_copy.default]
    return [node for node in casts if node.args[0] in joint.primals]


@pytest.mark.parametrize(
    "kinds",
    [["direct", "threads", "direct"], pytest.param(["cuda"] * 4, marks=pytest.mark.gpu)],
    ids=["cpu", "cuda"],
)
@pytest.mark.parametrize(
    ("model", "step"), [(Shared, autocast), (RegionInside, plain)], ids=["around", "inside"]
)
def test_a_parameter_is_cast_once_for_all_its_uses(
    model: type[nn.Module], step: Step, kinds: list[str]
) -> None:
    wrong, host = outcome(task(model), step, kinds, "cuda" if "cuda" in kinds else "cpu")
    assert wrong == []
    assert host.reasons == []
    # The weights and biases of three layers; a step is no input, but a part of one.
    casts = casts_of(host)
    assert len(casts) == 8
    # What only shows one of them takes no bytes.
    shows = [user for cast in casts for user in cast.users if user.target is ATEN.t.default]
    layouts = [part.layout for it in host.drawn for part in it.parts if part.forward]
    assert len(shows) >= 18
    assert all(it.storage_of[n] == it.storage_of[n.args[0]] for it in layouts for n in shows)


@pytest.mark.parametrize(
    ("model", "step"), [(Shared, without_cache), (CastByHand, plain), (Shared, plain)]
)
def test_what_autocast_does_not_remember_stays_as_it_is(model: type[nn.Module], step: Step) -> None:
    wrong, host = outcome(task(model), step, ["direct", "threads"])
    assert wrong == []
    assert host.reasons == []


@pytest.mark.parametrize(
    ("model", "step", "reason"),
    [
        (TwoRegions, plain, "how often autocast"),
        (CastsToo, autocast, "to others"),
        (InACheckpoint, plain, "how often autocast"),
        (OtherDtypeInside, plain, "how often autocast"),
        (NoCacheInside, plain, "how often autocast"),
        (TwiceInOneOp, autocast, "in which order"),
        (PassedThrough, autocast, "in which order"),
    ],
)
def test_where_it_is_not_known_how_gradients_are_added_nothing_is_captured(
    model: type[nn.Module], step: Step, reason: str
) -> None:
    wrong, host = outcome(task(model), step, ["direct", "direct"])
    assert wrong == []
    assert reason in str(host.reasons)


def penalized(training: Training, index: int) -> list[Tensor]:
    """What autocast casts for the model it casts for the loss as well."""
    model = training.model
    assert isinstance(model, Shared)
    x, y = training.batch(index)
    with torch.autocast(training.device, torch.bfloat16):
        result = model(x)
        penalty = (model.head.weight @ model.head.weight.T).float().square().mean()
        loss = training.task.loss(result, y) + penalty
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return [loss]


def trained(of: type[nn.Module], step: Step, *, exact: bool = False) -> tuple[bool, str]:
    """Whether all is as plain PyTorch has it, and the report."""
    expected = Training(task(of)).run(step, range(6)).outcome()
    training = Training(task(of))
    with belady.virtualize(training.model, "1GiB", engine="graph", exact=exact) as vm:
        found = training.run(step, range(6)).outcome()
        return differences(expected, found) == [], vm.report()


SAID = "casts a parameter that is used outside of the graph, too"


def test_what_runs_in_float32_is_differentiated_in_float32() -> None:
    wrong, host = outcome(task(InFloat32), autocast, ["direct", "threads"])
    assert wrong == []
    assert host.reasons == []


def test_one_region_that_is_a_decorator_is_one() -> None:
    wrong, host = outcome(task(Decorated), plain, ["direct", "threads"])
    assert wrong == []
    assert host.reasons == []


def test_whether_an_input_is_a_leaf_can_change() -> None:
    read = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read = nn.ModuleList(read)

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = (it(x) for it in self.read)
            return (query @ key.T).tanh() @ value

    def gradients(model: nn.Module) -> list[Tensor]:
        found = []
        for number in range(6):
            x = torch.full((8, WIDTH), 0.1 + number, requires_grad=True)
            with torch.autocast("cpu", torch.bfloat16):
                result = model(x if number % 2 else x * 1.0)
            result.float().square().sum().backward()
            assert x.grad is not None
            found.append(x.grad)
        return found

    plainly = gradients(Reads())
    managed = Reads()
    with belady.virtualize(managed, "1GiB", engine="graph"):
        assert all(map(torch.equal, plainly, gradients(managed)))


@pytest.mark.parametrize(("of", "step"), [(InTwoGraphs, autocast), (Shared, penalized)])
def test_a_parameter_that_others_use_too_is_told(of: type[nn.Module], step: Step) -> None:
    same, report = trained(of, step)
    assert not same
    assert SAID in report


@pytest.mark.parametrize(("of", "step"), [(Shared, autocast), (InTwoGraphs, plain)])
def test_one_that_no_other_uses_is_not(of: type[nn.Module], step: Step) -> None:
    _, report = trained(of, step)
    assert SAID not in report


def test_parts_that_cast_run_as_plain_pytorch_where_bits_are_exact() -> None:
    same, report = trained(InTwoGraphs, autocast, exact=True)
    assert same
    assert "casts parameters that autocast casts once for it and other parts" in report


def test_a_whole_that_casts_what_others_use_is_an_error_where_bits_are_exact() -> None:
    with pytest.raises(GraphError, match=SAID):
        trained(Shared, penalized, exact=True)


def test_what_begins_later_is_an_error_where_bits_are_exact() -> None:
    training = Training(task(Shared))
    with belady.virtualize(training.model, "1GiB", engine="graph", exact=True):
        training.run(autocast, range(6))
        with pytest.raises(GraphError, match=SAID):
            training.run(penalized, range(6, 7))
