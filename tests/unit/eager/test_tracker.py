from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import belady


def test_what_is_known_of_an_optimizer_goes_with_it() -> None:
    ours, other = nn.Linear(4, 4), nn.Linear(4, 4)
    ended: list[object] = []
    with belady.virtualize(ours, "1GiB", engine="eager") as vm:
        vm.listeners.append(ended.append)
        for _ in range(3):
            # Each may be made at the address at which one for the other model was.
            kept: list[torch.optim.Optimizer] = []
            for model in (other, ours):
                made = torch.optim.SGD(model.parameters(), 0.1)
                loss = other(ours(torch.randn(2, 4))).sum()
                loss.backward()
                made.step()
                kept.append(made)
            assert len(vm._tracker._owned) == len(kept)
            del made, kept
            gc.collect()
            assert not vm._tracker._owned
    assert len(ended) == 3


class Forces(nn.Module):
    """A gradient inside a forward, by a transform."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda it: self.layer(it).tanh().sum())(x)


def test_what_takes_no_hooks_says_which_engine_has_none() -> None:
    model, x = Forces(), torch.randn(2, 4)
    model(x).sum().backward()
    expected = model.layer.weight.grad
    model.zero_grad()
    with belady.virtualize(model, "1GiB", engine="eager"):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="saved tensor hooks") as told:
                model(x)
            assert "engine='graph'" in told.value.__notes__[0]
            assert len(told.value.__notes__) == 1
    with belady.virtualize(model, "1GiB", engine="graph"):
        model(x).sum().backward()
    assert expected is not None
    assert torch.equal(expected, model.layer.weight.grad)
