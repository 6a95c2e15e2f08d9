"""Masks that programs make since they are traced leave attention where plain PyTorch has none."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

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
    """Asks for a mask, and masks the future without one.

    Parameters
    ----------
    heads
        That have keys of their own, of four.
    repeats
        Whether each of the four is given keys where there is no mask, too.
    """

    def __init__(
        self, made: list[ModuleType], *, positioned: bool, heads: int, repeats: bool
    ) -> None:
        super().__init__()
        self.mix, self.ask, self.repeat = nn.Linear(16, 96), made[1].ask, made[0].repeat_kv
        self.positioned, self.heads, self.repeats = positioned, heads, repeats

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        positions = torch.arange(length).unsqueeze(0) if self.positioned else None
        mask = self.ask(length, positions)
        query, key, value = self.mix(x).unflatten(-1, (12, 8)).transpose(1, 2).chunk(3, 1)
        key, value = key[:, : self.heads], value[:, : self.heads]
        shared = self.heads < 4
        if shared and (self.repeats or mask is not None):
            key, value, shared = self.repeat(key), self.repeat(value), False
        seen = F.scaled_dot_product_attention(
            query, key, value, mask, 0.0, mask is None, enable_gqa=shared
        )
        return x + seen.transpose(1, 2).flatten(2)[..., :16]


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
        ("create_sliding_window_causal_mask(length, window=13)", False, True, False),
        ("sdpa_mask(length, None, None, False)", False, True, True),
    ],
)
@pytest.mark.usefixtures("imported")
def test_as_in_plain_pytorch(
    asks: str, positioned: bool, looks: bool, masked: bool, tmp_path: Path
) -> None:
    made = files(tmp_path, asks, looks=looks)
    wanted, found, names = trained(made, positioned=positioned)
    assert torch.equal(found, wanted)
    assert any("aten.le" in it for it in names) == masked


@pytest.mark.parametrize(
    ("asks", "repeats", "masked"),
    [
        # As versions of today ask, as older ones do, where all repeat keys, and where nobody knows.
        (lambda mask, key, value: mask is None and key.shape == value.shape, False, False),
        (lambda mask, key: mask is None and key.shape[1] == 2, False, False),
        (lambda mask, key: False, True, False),
        (None, True, True),
    ],
)
@pytest.mark.usefixtures("imported")
def test_heads_share_keys_as_in_plain_pytorch(
    asks: Callable[..., bool] | None,
    repeats: bool,
    masked: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside a mask each has its own."""
    made, given = files(tmp_path, ASKS, looks=True), ModuleType("sdpa_attention")
    if asks is not None:
        given.use_gqa_in_sdpa = asks  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers.integrations.sdpa_attention", given)
    wanted, found, names = trained(made, positioned=False, heads=2, repeats=repeats)
    assert any("aten.le" in it for it in names) == masked
    attends = next(at for at, it in enumerate(names) if "dot_product" in it)
    assert any("aten.clone" in it for it in names[:attends]) == repeats
    torch.testing.assert_close(found, wanted)
    assert masked or torch.equal(found, wanted)


def trained(
    made: list[ModuleType], *, positioned: bool, heads: int = 4, repeats: bool = False
) -> tuple[Tensor, Tensor, list[str]]:
    """Gradients of plain PyTorch and of captured graphs, and what runs there."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    options = {"positioned": positioned, "heads": heads, "repeats": repeats}
    model = nn.Sequential(*(Attention(made, **options) for _ in range(2)))
    x = torch.randn(2, LENGTH, 16, requires_grad=True)
    (wanted,) = torch.autograd.grad(model(x).square().mean(), x)
    with belady.virtualize(model, "1MiB", engine="graph") as vm:
        for _ in range(4):
            (found,) = torch.autograd.grad(model(x).square().mean(), x)
        run = vm.run()
    assert run is not None
    return wanted, found, [op.name for op in run.trace.ops]


GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
LLAMA: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
# Heads share keys.
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("config", "model", "sizes"),
    [
        ("GPT2Config", "GPT2LMHeadModel", GPT2),
        ("LlamaConfig", "LlamaForCausalLM", LLAMA),
    ],
)
def test_models_of_hugging_face(config: str, model: str, sizes: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    torch._dynamo.reset()
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "vocab_size": 50, "use_cache": False}
    made = getattr(transformers, model)(getattr(transformers, config)(**sizes, **ends)).train()
    tokens, weights = torch.randint(0, 50, (2, 64)), list(made.parameters())
    wanted = torch.autograd.grad(made(tokens).logits.square().mean(), weights)
    with belady.virtualize(made, "64MiB", engine="graph") as vm:
        for _ in range(4):
            found = torch.autograd.grad(made(tokens).logits.square().mean(), weights)
        run = vm.run()
    assert all(map(torch.equal, found, wanted))
    assert run is not None
    assert not any("aten.le" in op.name for op in run.trace.ops)
