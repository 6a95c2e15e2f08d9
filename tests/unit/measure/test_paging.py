"""Links of managed memory are measured with one block, which is given back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from belady.errors import TierError, TierFullError
from belady.ir.files import dumps, loads
from belady.ir.hardware import HardwareProfile
from belady.ir.trace import Tier
from belady.measure import probe as module
from belady.measure.paging import MIB, SIZES, managed_links
from belady.measure.probe import probe
from belady.memory.files import Files
from belady.memory.lanes import CpuLanes
from tests.support.managed import TwoSided

CPU = torch.device("cpu")


def test_each_way_has_its_rate() -> None:
    driver = TwoSided(faults=True)
    links = managed_links(CpuLanes(CPU), driver)
    assert (links.out.source, links.out.target) == (Tier.DEVICE, Tier.HOST)
    for link in (links.back, links.fault):
        assert (link.source, link.target) == (Tier.HOST, Tier.DEVICE)
    for link in (links.out, links.back, links.fault):
        assert [size for size, _ in link.curve] == list(SIZES)
        assert all(rate > 0 for _, rate in link.curve)
        assert 0 < link.latency_s < 1
    assert links.fault.issue_s == 0 < links.out.issue_s
    assert (driver.allocated, driver.blocks) == (1, 0)


def test_no_more_is_taken_than_a_quarter_of_what_is_free() -> None:
    driver = TwoSided(free=64 * MIB)
    links = managed_links(CpuLanes(CPU), driver)
    assert [size for size, _ in links.out.curve] == [2 * MIB, 16 * MIB]
    assert max(size for _, size, *_ in driver.calls) == 16 * MIB


def test_a_full_device_is_left_alone() -> None:
    driver = TwoSided(free=7 * MIB)
    with pytest.raises(TierFullError, match=r"only 7\.00 MiB of the device are free"):
        managed_links(CpuLanes(CPU), driver)
    assert driver.allocated == 0


def test_a_block_is_given_back_when_measuring_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise TierError("refused")

    driver = TwoSided()
    monkeypatch.setattr(driver, "prefetch", refused)
    with pytest.raises(TierError, match="refused"):
        managed_links(CpuLanes(CPU), driver)
    assert driver.blocks == 0


def test_a_cpu_has_no_managed_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Files, "file_system", lambda *_: "ext4")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "_measure", lambda *_: ((), ()))
    assert probe(CPU, spill_dir=str(tmp_path)).managed is None


def test_it_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = managed_links(CpuLanes(CPU), TwoSided())
    asked = []

    def measured(device: torch.device) -> object:
        asked.append(device)
        return links, ()

    monkeypatch.setattr(Files, "file_system", lambda *_: "ext4")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "_measure", lambda *_: ((), ()))
    monkeypatch.setattr(module, "_managed", measured)
    for _ in range(2):
        profile = probe(CPU, spill_dir=str(tmp_path))
        assert profile.managed == links
        assert loads(HardwareProfile, dumps(profile)) == profile
    assert len(asked) == 1


@pytest.mark.gpu
def test_a_gpu_has_managed_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = torch.cuda.mem_get_info()[0]
    found = []
    for number in range(3):  # the best, as other processes may have the device in between
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(number)))
        found.append(probe(torch.device("cuda")).managed)
    links = [it for it in found if it is not None]
    assert len(links) == len(found)
    assert max(it.fault.bytes_per_s for it in links) < max(it.back.bytes_per_s for it in links)
    assert max(it.out.bytes_per_s for it in links) > 1e9
    torch.cuda.empty_cache()
    # Beside other tests on the same device its free bytes say nothing.
    assert torch.cuda.mem_get_info()[0] > free - 256 * MIB or "PYTEST_XDIST_WORKER" in os.environ
