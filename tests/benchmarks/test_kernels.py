"""The verb ``kernels`` answers every question, here for the CPU."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import torch

from benchmarks import kernels, records
from benchmarks.questions import ALLOWED_MIB, precisely


def test_every_question_is_answered(tmp_path: Path) -> None:
    out = tmp_path / "kernels.jsonl"
    toy = Namespace(out=out, question=None, device="cpu", repeats=1, images=1, edge=8)
    assert kernels.run(toy) == 0
    found = records.read(out)
    assert {record["what"] for record in found} == {"digest", "replay", "convolution", "slice"}
    assert all(record["device_name"] == "cpu" for record in found)
    replays = [record for record in found if record["what"] == "replay"]
    assert all(record["same_bits"] and record["s_per_gib"] > 0 for record in replays)
    _each_limit_has_its_settings_before_and_after(found)
    table = kernels.table(found)
    apart = "convolution", "slice"
    others = [record for record in found if record["what"] not in apart]
    convolutions = {
        (it["way"], it["precision"], it["channels_last"])
        for it in found
        if it["what"] == "convolution"
    }
    sliced = {(it["way"], *it["channels"]) for it in found if it["what"] == "slice"}
    assert len(sliced) == 3 * 4
    assert table.count("\n") == 4 + len(others) + 3 + len(convolutions) + 3 + len(sliced)
    assert "| replay | batch norm, bf16, channels_last |" in table
    assert "| forward, tf32, channels_last |" in table
    assert "| limit of 64 MiB |" in table
    assert "NO" not in table


def _each_limit_has_its_settings_before_and_after(found: list[dict[str, object]]) -> None:
    names = ("way", "setting", "limit_mib", "precision", "channels_last")
    asked = [
        tuple(record[name] for name in names) for record in found if record["what"] == "convolution"
    ]
    limited = {"before a limit", "limited", "limit lifted", "after a limit"}
    settings = {(setting, limit) for _, setting, limit, _, _ in asked}
    assert {setting for setting, limit in settings if limit == 0} == limited
    assert {setting for setting, limit in settings if limit is None} == {
        "default",
        "benchmark",
        "deterministic",
    }
    assert len(set(asked)) == len(asked) == 4 * 3 * 2 * (3 + 4 * len(ALLOWED_MIB))
    convolutions = [record for record in found if record["what"] == "convolution"]
    assert all(it["allow_tf32"] == (it["precision"] == "tf32") for it in convolutions)


def test_an_algorithm_that_does_not_exist_and_an_older_record_have_rows() -> None:
    about = {"device_name": "any", "torch": "2", "what": "convolution", "way": "forward"}
    told = {**about, "setting": "limited", "limit_mib": 0, "error": "no engine"}
    older = {**about, "setting": "default", "cap_mib": "0", "s": 0.5, "workspace_bytes": 1 << 20}
    table = kernels.table([told, older])
    assert "| limit of 0 MiB | default, CUDNN_CONV_WSCAP_DBG=0 |" in table
    assert "| forward, , NCHW | no engine | 500.0, 1 |" in table


def test_cudnn_is_in_use_whatever_is_set() -> None:
    cudnn = torch.backends.cudnn
    before = cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32
    with precisely("fp32", benchmark=True):
        assert (cudnn.enabled, cudnn.benchmark, cudnn.allow_tf32) == (True, True, False)
    with precisely("tf32", deterministic=True):
        assert (cudnn.enabled, cudnn.deterministic, cudnn.allow_tf32) == (True, True, True)
    assert (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32) == before


def test_slices_have_a_column_for_each_size_and_room_largest_first() -> None:
    about = {"device_name": "any", "torch": "2", "what": "slice", "way": "forward", "edge": 8}
    of = {**about, "channels": [3, 4], "s": 0.25, "workspace_bytes": 3 << 20}
    sizes = [(8, 256), (8, None), (32, 256), (32, 1024), (32, None)]
    found = [{**of, "samples": samples, "room_mib": room} for samples, room in sizes]
    found[0] = {**found[0], "error": "no engine"}
    table = kernels.table(found)
    head = "32, any room | 32, 1024 MiB | 32, 256 MiB | 8, any room | 8, 256 MiB"
    assert f"| ms of the batch, MiB of workspace | {head} |" in table
    cells = " | ".join(["250.0, 3"] * 4)
    assert f"| forward, 3 to 4, 8 pixels | {cells} | no engine |" in table


def test_copies_beside_kernels_are_told_as_shares_of_copies_alone() -> None:
    about = {"device_name": "any", "torch": "2", "what": "copy", "both": False}
    gib = 2**30 / 1e9
    found = [
        {**about, "way": way, "beside": beside, "both": both, "s_per_gib": gib / rate}
        for beside, rates in (("nothing", (50.0, 40.0)), ("relu", (45.0, 20.0)))
        for way, both, rate in zip(("out", "out"), (False, True), rates, strict=True)
    ]
    table = kernels.table(found)
    assert "| GB/s beside | out | out, both at once |" in table
    assert "| nothing | 50.0 | 40.0 |" in table
    assert "| relu | 45.0, 90% | 20.0, 50% |" in table


def test_ways_of_pooling_stand_side_by_side() -> None:
    about = {"device_name": "any", "torch": "2", "what": "pooling", "op": "(1, 1, 8, 8), window 3"}
    found = [
        {**about, "way": way, "channels_last": last, "s": seconds, "backward_s": 2 * seconds}
        for last in (True, False)
        for way, seconds in (("Inductor", 3e-3), ("in windows", 1e-3))
    ]
    table = kernels.table(found)
    assert "| (1, 1, 8, 8), window 3, channels_last | 3.00 | 1.00 | 3.0 times |" in table
    assert "| (1, 1, 8, 8), window 3, gradient | 6.00 | 2.00 | 3.0 times |" in table
    assert table.count("3.0 times") == 4
