from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from belady.sections.standins import StandIns
from belady.sections.wrap import wrap
from tests.unit.sections.comparing import children


class Interrupted(dict[str, Any]):
    """A dict of which one write is interrupted."""

    left = 3

    def __setitem__(self, name: str, value: object) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        super().__setitem__(name, value)


def test_aliases_stand_for_what_trains_and_share_its_bytes() -> None:
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    weight, bias = layer.weight, layer.bias
    with StandIns().standing([layer], {}) as aliases:
        assert list(aliases) == [weight]
        assert layer.weight is aliases[weight]
        assert layer.weight.data_ptr() == weight.data_ptr()
        assert layer.weight.is_leaf
        assert layer.bias is bias
    assert layer.weight is weight


@pytest.mark.parametrize("repair", ["the next call", "undo"])
def test_an_interrupt_while_putting_back_is_repaired(repair: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    weight, bias = model[0].weight, model[0].bias
    undo = wrap(model, [children(range(2), 2)])
    # Two writes put aliases in place; the third, which puts a parameter back, does not come.
    model[0]._parameters = Interrupted(model[0]._parameters)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(4, 2))
    assert model[0].weight is not weight or model[0].bias is not bias
    undo() if repair == "undo" else model(torch.randn(4, 2))
    assert model[0].weight is weight
    assert model[0].bias is bias
