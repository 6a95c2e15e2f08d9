"""Products whose sizes suit no fast kernel are padded, and give what they gave."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import belady
from belady.graph import alignment
from belady.ir.run import Run

CLASSES, WIDTH, ROWS = 603, 320, 512
SHOWING = {"aten.view.default", "aten._unsafe_view.default", "aten.t.default"}


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment, "_DEVICES", {"cpu", "cuda"})


@pytest.mark.parametrize(
    ("left", "right", "pads"),
    [
        # What lies in rows of whole words is left.
        ((256, 512), (512, 1024), None),
        # As the head of a language model: forward, of its input, and of its weight.
        ((1024, 512), (512, 601), (0, 0, 7)),
        ((1024, 601), (601, 512), (0, 7, 0)),
        ((601, 1024), (1024, 512), None),
        # Too little is done for each byte that would be copied.
        ((64, 16), (16, 601), None),
        ((1024, 512), (512, 1), None),
    ],
)
def test_which(left: tuple[int, int], right: tuple[int, int], pads: object) -> None:
    operands = (torch.empty(shape, dtype=torch.bfloat16) for shape in (left, right))
    assert alignment._pads(*operands) == pads


def test_along_which_side_an_operand_lies() -> None:
    turned = torch.empty(1024, 601, dtype=torch.bfloat16).t()
    other = torch.empty(1024, 512, dtype=torch.bfloat16)
    assert alignment._pads(turned, other) == (7, 0, 0)
    assert alignment._pads(turned.float(), other.float()) is None


class Head(nn.Module):
    """A language model's head alone, in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.first(x)))


def trained(engine: str | None) -> tuple[list[Tensor], Run | None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, run = Head(), None
    x, target = torch.randn(2, ROWS // 2, WIDTH), torch.randint(CLASSES, (ROWS,))
    vm = belady.virtualize(model, "64MiB", engine=engine) if engine is not None else None
    found: list[Tensor] = []
    for _ in range(6):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
            loss = F.cross_entropy(logits.flatten(0, 1), target)
        loss.backward()
        assert logits.is_contiguous()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found = [logits.detach(), loss.detach(), *(grad.clone() for grad in grads)]
        assert all(it.untyped_storage().nbytes() == it.nbytes for it in [logits, *grads])
    if vm is not None:
        run = vm.run()
        vm.close()
    return found, run


@pytest.mark.parametrize(
    # Weights for forward and for backward, and once the gradient of the logits.
    ("engine", "part", "padded"),
    [("inductor", 8, 3), ("inductor", 200, 0), ("graph", 8, 0)],
)
def test_where_bits_may_differ_and_there_is_room(
    engine: str, part: int, padded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alignment, "_PART", part)
    plain, _ = trained(None)
    found, run = trained(engine)
    assert run is not None
    assert sum("constant_pad_nd" in op.name for op in run.trace.ops) == padded
    # What shows a product lies on its bytes, padded or not.
    assert not [op.name for op in run.trace.ops if op.name in SHOWING]
    products = [op for op in run.trace.ops if op.name == "aten.mm.default"]
    assert len(products) == 5
    torch.testing.assert_close(found, plain, atol=2e-2, rtol=2e-2)
