"""Buffers that forward updates are written in one call, and have the bits they had."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, fx, nn

import belady
from belady.graph import capture
from belady.graph.buffers import update_together

COPY, COPY_ALL = torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default
BATCH, WIDTH, NORMS = 8, 16, 3


class Updating(nn.Module):
    """Norms over the batch; a mean of another precision, and one that is laid out otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(NORMS))
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(WIDTH, BATCH).t())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for norm in self.norms:
            x = norm(x).relu()
        self.mean.lerp_(x.detach().double().mean(0), 0.1)  # type: ignore[operator]
        self.seen.copy_(x.detach())  # type: ignore[operator]
        return x


def trained(model: nn.Module, engine: str | None) -> list[Tensor]:
    torch.manual_seed(0)
    vm = belady.virtualize(model, "64MiB", engine=engine) if engine is not None else None
    own = [model.mean, model.seen]
    versions = [buffer._version for buffer in own]
    for _ in range(4):
        model(torch.randn(BATCH, WIDTH)).square().mean().backward()
    # Whoever saved one before is told that it was written to.
    assert all(it._version > before for it, before in zip(own, versions, strict=True))
    if vm is not None:
        vm.close()
    torch._dynamo.reset()
    grads = [it.grad for it in model.parameters() if it.grad is not None]
    return [*(buffer.clone() for buffer in model.buffers()), *grads]


@pytest.mark.parametrize("engine", ["graph", "eager"])
def test_they_have_the_bits_of_plain_pytorch(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[fx.GraphModule] = []

    def update(joint: fx.GraphModule) -> None:
        update_together(joint)
        written.append(joint)

    monkeypatch.setattr(capture, "update_together", update)
    torch.manual_seed(1)
    model = Updating()
    expected = trained(copy.deepcopy(model), None)
    found = trained(model, engine)
    assert all(torch.equal(mine, it) for mine, it in zip(found, expected, strict=True))
    for joint in written:
        (together,) = joint.graph.find_nodes(op="call_function", target=COPY_ALL)
        assert len(together.args[0]) == 2 * NORMS + 1
        # One has another precision.
        assert len(joint.graph.find_nodes(op="call_function", target=COPY)) == 1
    assert bool(written) == (engine == "graph")


def test_what_is_written_twice_is_left() -> None:
    graph = fx.Graph()
    held, *others = (graph.placeholder(name) for name in ("held", "one", "other"))
    for node in (held, *others):
        node.meta["val"] = torch.empty(WIDTH, device="meta")
    for made in others:
        graph.call_function(COPY, (held, made)).meta["val"] = torch.empty(WIDTH, device="meta")
    graph.output(())
    joint = fx.GraphModule({}, graph)
    update_together(joint)
    assert len(graph.find_nodes(op="call_function", target=COPY)) == 2
