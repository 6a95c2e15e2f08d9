from __future__ import annotations

import gc

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
