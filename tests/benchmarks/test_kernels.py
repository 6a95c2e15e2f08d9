"""The verb ``kernels`` answers every question, here for the CPU."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

import torch

from benchmarks import kernels, records
from benchmarks.questions import CAP, _precisely


def test_every_question_is_answered(tmp_path: Path) -> None:
    out = tmp_path / "kernels.jsonl"
    toy = Namespace(out=out, question=None, device="cpu", repeats=1, images=1, edge=8)
    assert kernels.run(toy) == 0
    found = records.read(out)
    assert {record["what"] for record in found} == {"digest", "replay", "convolution"}
    assert all(record["device_name"] == "cpu" for record in found)
    replays = [record for record in found if record["what"] == "replay"]
    assert all(record["same_bits"] and record["s_per_gib"] > 0 for record in replays)
    _convolutions_are_asked_about_with_a_cap_and_without(found)
    assert CAP not in os.environ
    table = kernels.table(found)
    assert table.count("\n") == 4 + len(found)
    assert "| replay | batch norm, bf16, channels_last |" in table
    assert "| convolution | forward, tf32, benchmark, workspace capped at 0 MiB |" in table
    assert "NO" not in table


def _convolutions_are_asked_about_with_a_cap_and_without(found: list[dict[str, object]]) -> None:
    names = ("way", "setting", "precision", "channels_last", "allow_tf32")
    free, capped = (
        [
            tuple(record[name] for name in names)
            for record in found
            if record["what"] == "convolution" and record["cap_mib"] == cap
        ]
        for cap in (None, "0")
    )
    assert free == capped
    assert len(set(free)) == len(free) == 4 * 3 * 3 * 2
    assert all(tf32 == (precision == "tf32") for _, _, precision, _, tf32 in free)


def test_cudnn_is_in_use_whatever_is_set() -> None:
    cudnn = torch.backends.cudnn
    before = cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32
    with _precisely("fp32", benchmark=True):
        assert (cudnn.enabled, cudnn.benchmark, cudnn.allow_tf32) == (True, True, False)
    with _precisely("tf32", deterministic=True):
        assert (cudnn.enabled, cudnn.deterministic, cudnn.allow_tf32) == (True, True, True)
    assert (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32) == before
