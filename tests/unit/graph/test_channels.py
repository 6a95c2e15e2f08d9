"""Convolutions of images with channels last: what that changes of a graph, and what not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor import config
from torch.utils._pytree import tree_leaves

from belady.graph import capture, channels
from belady.graph.capture import backend_of
from belady.ir.plan import Plan
from belady.ir.trace import Trace
from belady.memory.geometry import steps_of
from tests.parity.graphs import PlannedHost
from tests.parity.racing import hostile_carrier, random_plan

WIDTH, SIDE, BATCH = 8, 12, 4
CONVOLUTIONS = {
    torch.ops.aten.convolution.default: (0, 1),
    torch.ops.aten.convolution_backward.default: (0, 1, 2),
}
CLONE = torch.ops.aten.clone.default


def conv(made: int = WIDTH, taken: int = WIDTH, size: int = 3) -> nn.Conv2d:
    return nn.Conv2d(taken, made, size, padding=size // 2)


class Module(nn.Module):
    """Two convolutions, and what a class below has between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = conv(taken=3)
        self.second = conv()
        self.make()

    def make(self) -> None:
        """Make what else there is."""


class Norms(Module):
    def make(self) -> None:
        self.norm = nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        return F.adaptive_avg_pool2d(self.second(x), 1).flatten(1)


class Ended(Module):
    """A norm whose gradient comes as rows."""

    def make(self) -> None:
        self.norm = nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(self.first(x))).flatten(1)


class Frozen(Ended):
    """The same, where statistics are not those of the batch."""

    def make(self) -> None:
        super().make()
        self.norm.eval()


class Pooled(Module):
    """A pooling of which the same is so."""

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self.second(self.first(x)), 2).flatten(1)


class Flat(Module):
    def make(self) -> None:
        self.head = nn.Linear(WIDTH * SIDE * SIDE, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)).flatten(1))


class Gate(Module):
    def make(self) -> None:
        self.gate = conv(size=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.first(x))
        return self.second(x * F.hardsigmoid(self.gate(x.mean((2, 3), keepdim=True))))


class Joined(Module):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        left, right = x.chunk(2, 1)
        x = self.second(torch.cat([F.silu(right), F.leaky_relu(left)], 1))
        return F.interpolate(F.pad(x, (1, 0, 0, 1)), scale_factor=2)


class Groups(Module):
    """An operator of which nothing is known, and so takes what it took."""

    def make(self) -> None:
        self.norm = nn.GroupNorm(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)))


class Dropped(Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(self.first(x), 0.5))


class Turned(Module):
    def make(self) -> None:
        self.up = nn.ConvTranspose2d(WIDTH, 6, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.first(x)).sigmoid()


class Shared(Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.second(self.first(x)).tanh())


class Permuted(Module):
    """As in ConvNeXt."""

    def make(self) -> None:
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = F.gelu(self.inner(self.norm(x.permute(0, 2, 3, 1))))
        return self.second(x + y.permute(0, 3, 1, 2))


class Attention(Module):
    """As in the model of a diffusion."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        rows = x.flatten(2).transpose(1, 2)
        rows = F.scaled_dot_product_attention(rows, rows, rows)
        return self.second(rows.transpose(1, 2).reshape(x.shape))


class Placed(Module):
    """What takes elements from other places."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(self.first(x), (1, 1, 1, 1), mode="reflect")
        x = torch.roll(x.permute(0, 2, 3, 1), 1, 1).flip(2).permute(0, 3, 1, 2)
        x = F.adaptive_max_pool2d(x, 6)
        whole = torch.eye(2, 3, dtype=x.dtype, device=x.device).expand(BATCH, 2, 3)
        grid = F.affine_grid(whole, [BATCH, 1, 6, 6], align_corners=False)
        x = F.grid_sample(x, grid, align_corners=False)
        return self.second(F.interpolate(x, scale_factor=2, mode="bicubic"))


class Several(Module):
    """Images that are returned."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.first(x)
        return y, self.second(y).relu(), y.mean((2, 3))


NETS = [
    Norms, Ended, Frozen, Pooled, Flat, Gate, Joined, Groups, Dropped, Turned, Shared, Permuted,
    Attention, Placed, Several,
]  # fmt: skip


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture
def laid(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[list[tuple[fx.GraphModule, fx.GraphModule, bool]]]:
    """Joint graphs before and after, and what was said of them."""
    found = list[tuple[fx.GraphModule, fx.GraphModule, bool]]()

    def lay(joint: fx.GraphModule) -> bool:
        copied = fx.Graph()
        copied.output(copied.graph_copy(joint.graph, {}))
        before = fx.GraphModule(joint, copied)
        found.append((before, joint, channels.lay_channels_last(joint)))
        return found[-1][2]

    monkeypatch.setattr(capture, "lay_channels_last", lay)
    # On a GPU Inductor's own rule leaves networks of so few channels as they are.
    with config.patch({"force_layout_optimization": True}):
        yield found


def trained(
    net: nn.Module, choose: Callable[[Trace], Plan] | None, taken: Tensor, count: int = 2
) -> list[Tensor]:
    """Results and gradients; in plain PyTorch without a chooser of plans."""
    carrier = hostile_carrier("cuda" if taken.is_cuda else "threads")
    run: nn.Module = net
    if choose is not None:
        host = PlannedHost([net], carrier, choose)
        host.plain_bits = False
        run = torch.compile(net, backend=backend_of(host), dynamic=False)  # type: ignore[assignment]
    x, found = taken.clone().requires_grad_(), list[Tensor]()
    for number in range(count):
        torch.manual_seed(number)
        results = tree_leaves(run(x))
        torch.stack([it.square().mean() for it in results]).sum().backward()
        found += [it.detach() for it in results]
    carrier.close()
    assert choose is None or not host.reasons
    return [*found, x.grad, *(it.grad for it in net.parameters() if it.grad is not None)]  # type: ignore[list-item]


def images(device: str = "cpu") -> Tensor:
    return torch.randn(BATCH, 3, SIDE, SIDE, dtype=torch.float64, device=device)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("net", NETS, ids=lambda net: net.__name__.lower())
def test_it_gives_what_it_gave(
    net: type[Module], device: str, laid: list[tuple[fx.GraphModule, ...]]
) -> None:
    torch.manual_seed(1)
    model = net().double().to(device)
    x, kind = images(device), "cuda" if device == "cuda" else "threads"
    expected = trained(copy.deepcopy(model), None, x)
    found = trained(model, lambda trace: random_plan(trace, kind, 3), x)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
        assert steps_of(mine) == steps_of(theirs)
    ((before, after, said),) = laid
    assert said
    for target, places in CONVOLUTIONS.items():
        for node in after.graph.find_nodes(op="call_function", target=target):
            operands = (node.args[place].meta["val"] for place in places)
            assert all(it.is_contiguous(memory_format=torch.channels_last) for it in operands)
    # And what it says of every tensor is so.
    given = [real(it) for it in before.graph.find_nodes(op="placeholder")]
    torch.manual_seed(0)
    theirs = fx.Interpreter(before).run(*[it.clone() for it in given])
    torch.manual_seed(0)
    mine = Checked(after).run(*given)
    pairs = zip(tree_leaves(mine), tree_leaves(theirs), strict=True)
    for a, b in ((a, b) for a, b in pairs if b is not None):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        assert steps_of(a) == steps_of(b)


class Parts(Module):
    """A result that is a part of another one, which lies as that does."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.second(self.first(x))
        return y, y[:, :2]


class Strides(Module):
    """Looks where bytes lie."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).transpose(2, 3)
        return self.second(torch.as_strided(y, (BATCH, WIDTH, 4, 4), y.stride()))


class Last(Module):
    """Has them last already."""

    def make(self) -> None:
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.contiguous(memory_format=torch.channels_last)))


class Sounds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(3 * SIDE, WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x.flatten(1, 2))


@pytest.mark.parametrize("net", [Parts, Strides, Last, Sounds], ids=lambda it: it.__name__.lower())
def test_what_cannot_lie_so_or_does_stays_as_it_was(
    net: type[nn.Module], laid: list[tuple[fx.GraphModule, ...]]
) -> None:
    torch.manual_seed(1)
    model = net().double()
    x = images()
    expected = trained(copy.deepcopy(model), None, x)
    found = trained(model, lambda trace: random_plan(trace, "threads", 3), x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    ((before, after, said),) = laid
    assert not said
    assert str(after.graph) == str(before.graph)


def real(holder: fx.Node) -> Tensor:
    said = holder.meta["val"]
    made = torch.empty_strided(said.shape, said.stride(), dtype=said.dtype, device=said.device)
    if not said.is_floating_point():
        return made.zero_()
    # Variances are positive.
    return made.normal_().abs_() if said.dim() == 1 else made.normal_()


class Checked(fx.Interpreter):
    """Runs a graph, and looks whether tensors lie as it says."""

    def run_node(self, n: fx.Node) -> object:
        made = super().run_node(n)
        for mine, said in zip(tree_leaves(made), tree_leaves(n.meta.get("val")), strict=False):
            if isinstance(said, Tensor):
                assert steps_of(mine) == steps_of(said), n
        return made
