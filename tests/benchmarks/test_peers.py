"""Every peer keeps the contract: it says why it is absent, or trains and leaves nothing behind."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from benchmarks.peers import PEERS
from benchmarks.suites import PEER_NAMES
from benchmarks.workloads import Workload
from tests.benchmarks.test_workloads import digest_of, toy

# Peers that run the same ops in the same order, perhaps twice.
SAME_BITS = ("plain", "checkpoint", "save_on_cpu", "checkpoint+save_on_cpu", "selective")


@pytest.fixture
def quick_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


def found_on(work: Workload) -> list[object]:
    return [
        (dict(module.__dict__.get("_forward_hooks", {})), "forward" in module.__dict__)
        for module in work.model.modules()
    ]


@pytest.mark.parametrize("name", PEERS)
def test_peer_trains_or_says_why_not(name: str, quick_compile: None) -> None:
    work = toy("llama")
    reason = PEERS[name].available(work)
    if reason is not None:
        assert reason
        return
    before = found_on(work)
    made = digest_of(work, name)
    assert found_on(work) == before
    if name in SAME_BITS:
        assert made == digest_of(toy("llama"))


def test_suites_name_every_peer() -> None:
    assert sorted(PEER_NAMES) == sorted(PEERS)


def test_a_model_is_as_found_after_an_error() -> None:
    work = toy("resnet50")
    before = found_on(work)
    with pytest.raises(KeyError), PEERS["checkpoint"].applied(work):
        raise KeyError
    assert found_on(work) == before
