"""Whether a run gives the same bits: compared in pieces, and no answer where there is no room."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from belady.measure import recipes
from belady.measure.clock import NoClock
from belady.measure.recipes import reaches


@pytest.mark.parametrize("at", [0, 99, 100, 101, 256])
def test_one_other_bit_is_found_in_any_piece(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "_COMPARED", 100)
    wanted = torch.arange(257, dtype=torch.uint8)
    other = wanted.clone()
    assert reaches(lambda: [other], [wanted], NoClock())
    other[at] ^= 1
    assert not reaches(lambda: [other], [wanted], NoClock())


def test_where_there_is_no_room_to_compare_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def scarce(_one: Tensor, _two: Tensor) -> bool:
        raise torch.OutOfMemoryError("no room")

    wanted = torch.ones(4)
    assert reaches(lambda: [wanted.clone()], [wanted], NoClock())
    monkeypatch.setattr(torch, "equal", scarce)
    assert not reaches(lambda: [wanted.clone()], [wanted], NoClock())
