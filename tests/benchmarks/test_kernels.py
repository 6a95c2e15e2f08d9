"""The verb ``kernels`` answers every question, here for the CPU."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from benchmarks import kernels, records


def test_every_question_is_answered(tmp_path: Path) -> None:
    out = tmp_path / "kernels.jsonl"
    assert kernels.run(Namespace(out=out, device="cpu", repeats=1, images=1)) == 0
    found = records.read(out)
    assert {record["what"] for record in found} == {"digest", "replay", "convolution"}
    assert all(record["device_name"] == "cpu" for record in found)
    replays = [record for record in found if record["what"] == "replay"]
    assert all(record["same_bits"] and record["s_per_gib"] > 0 for record in replays)
    assert kernels._CAP not in os.environ
    table = kernels.table(found)
    assert table.count("\n") == 4 + len(found)
    assert "| replay | batch norm, torch.bfloat16, channels_last |" in table
    assert "NO" not in table
