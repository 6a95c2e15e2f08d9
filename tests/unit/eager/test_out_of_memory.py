"""What a user is told when the device runs out of memory after all."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import belady
from belady.measure.starving import out_of_memory
from belady.units import parse_bytes

FULL = torch.OutOfMemoryError("no room for 98 MiB")


def test_the_budget_that_an_optimizer_like_adam_needs_is_named() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    trained = sum(parameter.nbytes for parameter in model.parameters())

    def train() -> None:
        with belady.virtualize(model, "1GiB"):
            model(torch.ones(8, 512)).sum().backward()
            raise FULL

    with pytest.raises(belady.OutOfMemoryError, match="no room for 98 MiB") as raised:
        train()
    assert raised.value.__cause__ is FULL
    needed = parse_bytes(re.findall(r"first step, (\S+ \S+) are needed", str(raised.value))[0])
    # Parameters, their gradients, two copies; and little else in a batch of 8.
    assert 4 * trained <= needed <= 4.5 * trained


def test_nothing_is_named_that_is_not_known() -> None:
    assert "are needed" not in str(out_of_memory(FULL, None))
    assert "larger budget" in str(out_of_memory(FULL, object()))


def test_what_is_not_managed_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).prod(0)

    def train() -> None:
        whole = Product()
        with belady.virtualize(whole, "1GiB", engine="graph"):
            whole(torch.ones(8, 8)).sum().backward()
            raise FULL

    with pytest.raises(
        belady.OutOfMemoryError, match=r"Not all of the model is managed \(.*prod"
    ) as raised:
        train()
    assert "engine='eager'" in str(raised.value)
