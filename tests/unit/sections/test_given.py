"""Modules in slices that are called with more than one tensor."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from belady.errors import SectionError
from belady.ir.plan import Section
from belady.ir.sections import apply
from belady.measure.batch import static_trace_with_batch
from belady.measure.static import static_trace
from belady.sections.candidate import Candidate
from belady.sections.given import separated
from belady.sections.wrap import wrap
from tests.unit.measure.watching import CPU
from tests.unit.sections.attentions import EACH, HEADS, LENGTH, WIDTH, Permuted, sequences
from tests.unit.sections.comparing import assert_same_in_sections
from tests.unit.sections.test_apply import peak, shapes
from tests.unit.sections.test_attention import sizes


class Placed(Permuted):
    """Is called by names, with tables of rotations and a mask, as layers of transformers are."""

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | None = None,
        tables: tuple[Tensor, Tensor] | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        b, t, c = hidden.shape
        parts = self.mix(hidden).chunk(3, -1)
        q, k, v = (it.view(b, t, HEADS, EACH).transpose(1, 2) for it in parts)
        if tables is not None:
            cos, sin = (it.unsqueeze(1) for it in tables)
            q, k = q * cos + sin, k * cos - sin
        seen = q @ k.mT * scale
        if mask is not None:
            seen = seen + mask
        return self.project((seen.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))


class Calling(nn.Module):
    """Makes what its layer is called with."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.layer = Placed()
        self.how = how
        self.token = nn.Parameter(torch.zeros(1, 1, 1, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(**self.given(self.before(x), x))

    def given(self, hidden: Tensor, x: Tensor) -> dict[str, Any]:
        at = torch.arange(LENGTH, dtype=x.dtype)
        causal = torch.full((LENGTH, LENGTH), -1e9, dtype=x.dtype).triu(1)
        angles = (at[:, None] / 10.0 ** torch.arange(EACH))[None]
        return {"hidden": hidden} | {
            "nothing": {"mask": None, "tables": None, "scale": 0.5},
            "shared": {"mask": causal[None, None], "tables": (angles.cos(), angles.sin())},
            "square": {"mask": causal},
            "samples": {"mask": x[:, None, None, :, 0]},
            "samples in a tuple": {"tables": (x[:, :, :EACH], x[:, :, :EACH])},
            "trained": {"mask": self.token * 1},
            "list": {"tables": [angles.cos(), angles.sin()]},
            "all samples": {"mask": x.mean((0, 2))[None, None, None]},
        }[self.how]


LAYER = Section(("layer",), 3)


def candidate(model: nn.Module) -> Candidate:
    found = Candidate.of(model, ((sequences(),), {}), CPU)
    assert found is not None
    return found


@pytest.mark.parametrize("how", ["nothing", "shared", "all samples"])
def test_what_has_no_samples_goes_to_every_slice(how: str) -> None:
    model = Calling(how)
    found = candidate(model)
    assert found.may_cut(LAYER), found.refused
    assert_same_in_sections(model, sequences(), LAYER)


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("how", ["nothing", "shared"])
def test_the_trace_foretells_saves_storages_and_peak(how: str, needs_gradient: bool) -> None:
    model, call = Calling(how), ((sequences(needs_gradient=needs_gradient),), {})
    predicted = apply(static_trace_with_batch(model, call, CPU), [LAYER])
    wrap(model, [LAYER])
    real = static_trace(model, call, CPU)
    assert shapes(predicted) == shapes(real)
    assert sizes(predicted) == sizes(real)
    assert peak(predicted) == peak(real)
    assert Counter(op.name for op in predicted.ops) == Counter(op.name for op in real.ops)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("square", "2 tensors with a batch dimension"),
        ("samples", "2 tensors with a batch dimension"),
        ("samples in a tuple", "may be the batch"),
        ("trained", "a second tensor that needs a gradient"),
        ("list", "list, which every slice could change"),
    ],
)
def test_what_slices_cannot_share_is_refused(how: str, reason: str) -> None:
    model = Calling(how)
    found = candidate(model)
    assert not found.may_cut(LAYER)
    assert reason in found.refused["layer"]
    wrap(model, [LAYER])
    with pytest.raises(SectionError, match=reason):
        model(sequences())


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        mask += 1
        return F.gelu(self.inner(hidden) + mask)


class Rows(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.layer = Adding() if how == "written" else Reading()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "written":
            return self.layer(self.before(x), torch.zeros(1, LENGTH, WIDTH, dtype=x.dtype))
        return self.layer(self.before(x), x[None, :, 0, 0])


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, row: Tensor) -> Tensor:
        return F.gelu(self.inner(hidden) + row.sum())


@pytest.mark.parametrize(
    ("how", "reason"), [("written", "writes what goes in"), ("a row of samples", "first dimension")]
)
def test_what_looks_shared_and_is_not_is_refused(how: str, reason: str) -> None:
    found = candidate(Rows(how))
    assert not found.may_cut(LAYER)
    assert reason in found.refused["layer"]


def test_the_rest_of_a_call_is_kept_apart_from_what_is_cut() -> None:
    x, row = torch.ones(3, 2), torch.ones(1, 2)
    whole, shared = separated("it", (x, (row, None)), {"flag": True})
    assert whole is x
    assert not shared.nothing
    call = shared.call(lambda *args, **kwargs: (args, kwargs), 5)
    assert call == ((5, (row, None)), {"flag": True})
    halves = shared.mapped(lambda it: it.half() if isinstance(it, Tensor) else it)
    (_, (half, _)), _ = halves.call(lambda *args, **kwargs: (args, kwargs), 5)
    assert half.dtype is torch.float16
    assert separated("it", (row,), {})[1].nothing


def test_a_model_in_slices_can_be_copied() -> None:
    model = Calling("shared").double()
    wrap(model, [LAYER])
    x = sequences().double()
    torch.testing.assert_close(copy.deepcopy(model)(x), model(x))
