"""Masks that programs make since they are traced leave attention where plain PyTorch has none."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import belady

LENGTH = 12
# As Hugging Face's models make it; what has another window than all there is always needs it.
SOURCE = """
import torch

def find_packed_sequence_indices(positions):
    packed = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    if LOOKS and not torch.compiler.is_compiling() and (packed[:, -1] == 0).all():
        return None
    return packed

def create(length, window, positions):
    packed = None if positions is None else find_packed_sequence_indices(positions)
    near = window is None or length < window
    if packed is None and near and not torch.compiler.is_compiling():
        return None
    queries, keys = torch.arange(length)[:, None], torch.arange(length)[None, :]
    mask = keys <= queries
    if window is not None:
        mask = mask & (keys > queries - window)
    if packed is not None:
        mask = mask & (packed[:, queries] == packed[:, keys])
    return mask.expand(1, 1, length, length)
"""


def utilities(folder: Path, *, looks: bool) -> ModuleType:
    """What `transformers.masking_utils` is to belady."""
    file = folder / "transformers" / "masking_utils.py"
    file.parent.mkdir()
    file.write_text(f"LOOKS = {looks}\n{SOURCE}")
    # Dynamo remembers modules by the names that they have themselves.
    spec = importlib.util.spec_from_file_location(f"masking_utils_{looks}", file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


class Attention(nn.Module):
    """Asks for a mask, and masks the future without one."""

    def __init__(self, utilities: ModuleType, window: int | None, positioned: bool) -> None:
        super().__init__()
        self.mix, self.create = nn.Linear(16, 48), utilities.create
        self.window, self.positioned = window, positioned

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        positions = torch.arange(length).unsqueeze(0) if self.positioned else None
        mask = self.create(length, self.window, positions)
        query, key, value = self.mix(x).unflatten(-1, (6, 8)).transpose(1, 2).chunk(3, 1)
        seen = F.scaled_dot_product_attention(query, key, value, mask, 0.0, mask is None)
        return x + seen.transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("window", "positioned", "looks", "masked"),
    [
        (None, False, True, False),
        (LENGTH + 1, False, True, False),
        (LENGTH, False, True, True),
        (LENGTH - 4, False, True, True),
        (None, True, True, False),
        (None, True, False, True),
    ],
)
def test_as_in_plain_pytorch(
    window: int | None,
    positioned: bool,
    looks: bool,
    masked: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = utilities(tmp_path, looks=looks)
    for name in ("transformers.masking_utils", made.__name__):
        monkeypatch.setitem(sys.modules, name, made)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention(made, window, positioned) for _ in range(2)))
    x = torch.randn(2, LENGTH, 16, requires_grad=True)
    (wanted,) = torch.autograd.grad(model(x).square().mean(), x)
    with belady.virtualize(model, "1MiB", engine="graph") as vm:
        for _ in range(4):
            (found,) = torch.autograd.grad(model(x).square().mean(), x)
        run = vm.run()
    assert torch.equal(found, wanted)
    assert run is not None
    assert any("aten.le" in op.name for op in run.trace.ops) == masked


def test_gpt2_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 50}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends, **off)).train()
    tokens, weights = torch.randint(0, 50, (2, 64)), list(model.parameters())
    wanted = torch.autograd.grad(model(tokens).logits.square().mean(), weights)
    with belady.virtualize(model, "64MiB", engine="graph") as vm:
        for _ in range(4):
            found = torch.autograd.grad(model(tokens).logits.square().mean(), weights)
        run = vm.run()
    assert all(map(torch.equal, found, wanted))
    assert run is not None
    assert not any("aten.le" in op.name for op in run.trace.ops)
