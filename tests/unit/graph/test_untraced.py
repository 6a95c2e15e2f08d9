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
# As Hugging Face's models make it.
UTILITIES = """
import torch

def find_packed_sequence_indices(positions):
    packed = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    if LOOKS and not torch.compiler.is_compiling() and (packed[:, -1] == 0).all():
        return None
    return packed

def create_causal_mask(length, positions=None, **more):
    packed = None if positions is None else find_packed_sequence_indices(positions)
    return sdpa_mask(length, None, packed, **more)

def create_sliding_window_causal_mask(length, positions=None, window=4):
    return sdpa_mask(length, window, None)

def sdpa_mask(length, window, packed, allow_is_causal_skip=True):
    skips = allow_is_causal_skip and packed is None and (window is None or length < window)
    if skips and not torch.compiler.is_compiling():
        return None
    queries, keys = torch.arange(length)[:, None], torch.arange(length)[None, :]
    mask = keys <= queries
    if window is not None:
        mask = mask & (keys > queries - window)
    if packed is not None:
        mask = mask & (packed[:, queries] == packed[:, keys])
    return mask.expand(1, 1, length, length)

def repeat_kv(x):
    batch, heads, length, width = x.shape
    x = x[:, :, None].expand(batch, heads, 2, length, width)
    return x.reshape(batch, 2 * heads, length, width)
"""
# And as models ask for it.
ASKS = "create_causal_mask(length, positions)"


def files(folder: Path, asks: str, *, looks: bool) -> list[ModuleType]:
    """What `transformers.masking_utils` is to belady, and a model's file."""
    model = f"from masking_utils import *\n\ndef ask(length, positions):\n    return {asks}\n"
    sources = {"masking_utils": f"LOOKS = {looks}\n{UTILITIES}", "modeling": model}
    made = []
    for name, source in sources.items():
        file = folder / "transformers" / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(source)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        made.append(importlib.util.module_from_spec(spec))
        sys.modules[name] = made[-1]
        if name == "masking_utils":
            sys.modules["transformers.masking_utils"] = made[-1]
        spec.loader.exec_module(made[-1])
    return made


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of these names are gone afterwards."""
    for name in ("masking_utils", "modeling", "transformers.masking_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


class Attention(nn.Module):
    """Asks for a mask, and masks the future without one."""

    def __init__(self, made: list[ModuleType], positioned: bool, grouped: bool) -> None:
        super().__init__()
        self.mix, self.ask, self.repeat = nn.Linear(16, 48), made[1].ask, made[0].repeat_kv
        self.positioned, self.grouped = positioned, grouped

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        positions = torch.arange(length).unsqueeze(0) if self.positioned else None
        mask = self.ask(length, positions)
        query, key, value = self.mix(x).unflatten(-1, (6, 8)).transpose(1, 2).chunk(3, 1)
        if self.grouped:
            key, value = key[:, :1], value[:, :1]
            if mask is not None:
                key, value = self.repeat(key), self.repeat(value)
        seen = F.scaled_dot_product_attention(
            query, key, value, mask, 0.0, mask is None, enable_gqa=self.grouped and mask is None
        )
        return x + seen.transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("asks", "positioned", "looks", "masked"),
    [
        (ASKS, False, True, False),
        (ASKS, True, True, False),
        # Of versions that do not look plain PyTorch's models have a mask too.
        (ASKS, True, False, True),
        ("create_causal_mask(length, allow_is_causal_skip=False)", False, True, True),
        ("create_sliding_window_causal_mask(length)", False, True, True),
        ("create_sliding_window_causal_mask(length, window=12)", False, True, True),
        ("sdpa_mask(length, None, None, False)", False, True, True),
    ],
)
@pytest.mark.usefixtures("imported")
def test_as_in_plain_pytorch(
    asks: str, positioned: bool, looks: bool, masked: bool, tmp_path: Path
) -> None:
    made = files(tmp_path, asks, looks=looks)
    wanted, found, names = trained(made, positioned=positioned, grouped=False)
    assert torch.equal(found, wanted)
    assert any("aten.le" in it for it in names) == masked


@pytest.mark.usefixtures("imported")
def test_heads_that_share_keys_do_as_they_are_traced(tmp_path: Path) -> None:
    """Beside a mask each has its own: without it these would be plain PyTorch's bits no more."""
    wanted, found, names = trained(
        files(tmp_path, ASKS, looks=True), positioned=False, grouped=True
    )
    torch.testing.assert_close(found, wanted)
    assert any("aten.le" in it for it in names)


def trained(
    made: list[ModuleType], *, positioned: bool, grouped: bool
) -> tuple[Tensor, Tensor, list[str]]:
    """Gradients of plain PyTorch and of captured graphs, and what runs there."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention(made, positioned, grouped) for _ in range(2)))
    x = torch.randn(2, LENGTH, 16, requires_grad=True)
    (wanted,) = torch.autograd.grad(model(x).square().mean(), x)
    with belady.virtualize(model, "1MiB", engine="graph") as vm:
        for _ in range(4):
            (found,) = torch.autograd.grad(model(x).square().mean(), x)
        run = vm.run()
    assert run is not None
    return wanted, found, [op.name for op in run.trace.ops]


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
