"""Every workload trains at toy size, the same from the same seed; its blocks are modules."""

from __future__ import annotations

import pytest
import torch

from benchmarks.live import LiveBytes
from benchmarks.measure import digest
from benchmarks.methods import opened
from benchmarks.workloads import WORKLOADS, Setting, Workload

SETTING = Setting("fp32", device="cpu")


def toy(name: str) -> Workload:
    return WORKLOADS[name].make(SETTING, {}, toy=True)


def digest_of(work: Workload, method: str = "plain", steps: int = 2) -> str:
    with opened(work, method) as opener, opener(None) as session:
        return digest(session, steps)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_repeats(name: str) -> None:
    assert digest_of(toy(name)) == digest_of(toy(name))


@pytest.mark.parametrize("name", WORKLOADS)
def test_blocks_are_modules_that_hold_most_parameters_or_activations(name: str) -> None:
    work = toy(name)
    assert work.blocks
    for block in work.blocks:
        work.model.get_submodule(block)


def test_no_toy_stands_for_two_networks() -> None:
    shapes = {
        name: [(type(m), [tuple(p.shape) for p in m.parameters(recurse=False)]) for m in modules]
        for name in WORKLOADS
        for modules in [list(toy(name).model.modules())]
    }
    assert len({str(found) for found in shapes.values()}) == len(WORKLOADS)


def test_the_toy_of_gpt2_is_of_its_kind() -> None:
    kinds = {name: {type(m) for m in toy(name).model.modules()} for name in ("gpt2", "llama")}
    assert {torch.nn.LayerNorm, torch.nn.Dropout} <= kinds["gpt2"] - kinds["llama"]
    model = toy("gpt2").model
    assert model.head.weight is model.wte.weight


def test_sizes_of_published_networks() -> None:
    with torch.device("meta"):
        counts = {
            name: sum(p.numel() for p in _parameters(name, **sizes)) / 1e6
            for name, sizes in {
                "alexnet": {"batch": 1},
                "vgg19": {"batch": 1, "depth": 19},
                "resnet50": {"batch": 1},
            }.items()
        }
    assert {name: round(count, 1) for name, count in counts.items()} == {
        "alexnet": 61.1,
        "vgg19": 143.7,
        "resnet50": 25.6,
    }


def _parameters(name: str, **sizes: int) -> list[torch.nn.Parameter]:
    return list(WORKLOADS[name].build(Setting(device="meta"), **sizes).model.parameters())


def test_live_bytes_are_those_of_storages() -> None:
    kept = torch.zeros(1000)
    with LiveBytes([kept]) as live:
        first = torch.zeros(2000)
        view = first[:10]
        del first
        assert live.nbytes == 4032 + 8000
        del view
        torch.zeros(100)
    assert live.nbytes == 4032
    assert live.peak_bytes == 4032 + 8000
