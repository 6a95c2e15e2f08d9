"""Verb ``kernels``: what running an op again, a digest and a cuDNN algorithm cost on this device.

Each question is one record. The planners take what they need from a trace; these records say why
they are built as they are, and whether a device still agrees.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from belady.eager.digests import digest
from belady.measure.clock import clock_for
from benchmarks import records
from benchmarks.cases import Record

GIB = 1 << 30
_CAP = "CUDNN_CONV_WSCAP_DBG"  # MiB; cuDNN's own, which PyTorch's documentation names
Make = Callable[[], Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("out", type=Path, help="JSON lines")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--images", type=int, default=128, help="samples of a feature map")


def run(arguments: argparse.Namespace) -> int:
    """Ask every question and print the answers."""
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    about = {"device_name": name, "torch": str(torch.__version__)}
    for question in (_digests, _replays, _convolutions):
        for answer in question(device, arguments.images, arguments.repeats):
            record = {"verb": "kernels", **about, **answer}
            records.append(arguments.out, record)
            print(json.dumps(answer))
    return 0


def committed() -> list[Record]:
    """All committed answers."""
    files = sorted((records.RESULTS / "kernels").glob("*.jsonl"))
    return [record for file in files for record in records.read(file)]


def table(found: list[Record]) -> str:
    """The section of docs/figures.md."""
    if not found:
        return "No records yet.\n"
    machines = sorted({f"{record['device_name']}, torch {record['torch']}" for record in found})
    rows = [_row(record) for record in found]
    head = "| what | how | ms for a GiB, or ms | shortcut | workspace MiB | same bits |\n"
    lines = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return f"Measured on: {'; '.join(machines)}.\n\n{head}{'|---' * 6}|\n{lines}"


def _row(record: Record) -> list[str]:
    how = [str(record[name]) for name in ("way", "op", "dtype", "setting") if name in record]
    if record.get("channels_last"):
        how.append("channels_last")
    workspace = record.get("workspace_bytes")
    same = [record[name] for name in ("same_bits", "shortcut_same_bits") if name in record]
    return [
        record["what"],
        ", ".join(how),
        f"{record.get('s_per_gib', record.get('s')) * 1e3:.2f}",
        _ms(record.get("shortcut_s_per_gib")),
        "" if workspace is None else f"{workspace / 2**20:.1f}",
        "" if not same else "yes" if all(same) else "NO",
    ]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f}"


def timed(device: torch.device, make: Make, repeats: int) -> tuple[float, int]:
    """Median seconds of ``make`` and the largest workspace, launch gaps left out."""
    make()
    clock = clock_for(device)
    for _ in range(repeats):
        clock.start()
        made = make()
        clock.stop()
        del made
    runs = clock.results()
    return median(seconds for seconds, _ in runs), max(workspace for _, workspace in runs)


def _digests(device: torch.device, images: int, repeats: int) -> Iterator[Record]:
    """One pass over the bytes, and what else would do."""
    content = torch.randint(0, 256, (images << 21,), dtype=torch.uint8, device=device)

    def columns(width: int, dtype: torch.dtype, dim: int) -> Make:
        words = content.view(dtype)
        table = words[: words.numel() // width * width].view(-1, width)
        return lambda: table.sum(dim, dtype=torch.int64)

    ways: dict[str, Make] = {
        "digest": lambda: digest(content),
        "columns of 1021 words": columns(1021, torch.int64, 0),
        "columns of 1024 words": columns(1024, torch.int64, 0),
        "columns of 8191 words": columns(8191, torch.int64, 0),
        "rows of 1021 words": columns(1021, torch.int64, 1),
        "columns of 1021 halves": columns(1021, torch.int32, 0),
        "copy": content.clone,
    }
    for name, make in ways.items():
        seconds, _ = timed(device, make, repeats)
        yield {"what": "digest", "way": name, "s_per_gib": seconds * GIB / content.numel()}


def _replays(device: torch.device, images: int, repeats: int) -> Iterator[Record]:
    """What it costs to make a GiB again, and whether the bits come out the same."""
    for half in (False, True):
        for last in (False, True):
            for name, make, cheaper in _ops(device, images, half=half, last=last):
                first = make()
                seconds, _ = timed(device, make, repeats)
                nbytes = first.untyped_storage().nbytes()
                answer = {
                    "what": "replay",
                    "op": name,
                    "dtype": str(first.dtype),
                    "channels_last": last,
                    "s_per_gib": seconds * GIB / nbytes,
                    "same_bits": torch.equal(first, make()),
                }
                if cheaper is not None and device.type == "cuda":
                    seconds, _ = timed(device, cheaper, repeats)
                    answer["shortcut_s_per_gib"] = seconds * GIB / nbytes
                    answer["shortcut_same_bits"] = torch.equal(first, cheaper())
                yield answer


def _ops(
    device: torch.device, images: int, *, half: bool, last: bool
) -> Iterator[tuple[str, Make, Make | None]]:
    dtype = torch.bfloat16 if half else torch.float32
    form = torch.channels_last if last else torch.contiguous_format

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    x = random(images, 64, 56, 56).contiguous(memory_format=form)
    scale, shift = torch.rand(2, 64, device=device)
    norm = torch.ops.aten.native_batch_norm.default
    arguments = (x, scale, shift, None, None, True, 0.1, 1e-5)
    _, mean, inverse = norm(*arguments)

    def again() -> torch.Tensor:
        made: torch.Tensor = torch.ops.aten.batch_norm_elemt.default(
            x, scale, shift, mean, inverse, 1e-5
        )
        return made

    yield "batch norm", lambda: norm(*arguments)[0], again
    yield "relu", lambda: torch.relu(x), None
    yield "add", lambda: x + x, None
    yield "max pool", lambda: F.max_pool2d(x, 3, 2, 1), None
    for size, into in ((3, 64), (1, 256)):
        weight = random(into, 64, size, size).contiguous(memory_format=form)
        yield (
            f"conv {size}x{size}, 64 to {into}",
            lambda w=weight, p=size // 2: F.conv2d(x, w, padding=p),
            None,
        )
    if last:
        return
    tokens, narrow = random(images * 64, 1024), random(1024, 4096)
    yield "matrix product, 1024 to 4096", lambda: tokens @ narrow, None
    yield "gelu", lambda: F.gelu(tokens), None
    yield "layer norm", lambda: F.layer_norm(tokens, (1024,)), None
    yield "softmax", lambda: torch.softmax(tokens, -1), None


@contextmanager
def _capped(mib: int) -> Iterator[None]:
    before = os.environ.get(_CAP)
    os.environ[_CAP] = str(mib)
    try:
        yield
    finally:
        del os.environ[_CAP]
        if before is not None:
            os.environ[_CAP] = before


def _convolutions(device: torch.device, images: int, repeats: int) -> Iterator[Record]:
    """Seconds and workspace of VGG's second convolution under what PyTorch lets one set."""
    settings: dict[str, tuple[AbstractContextManager[Any], ...]] = {
        "default": (),
        "benchmark": (torch.backends.cudnn.flags(benchmark=True, benchmark_limit=0),),
        "deterministic": (torch.backends.cudnn.flags(deterministic=True),),
        # Whether a running process heeds it is the question.
        "capped at 0 MiB": (_capped(0),),
    }
    x = torch.randn(images // 4 or 1, 64, 112, 112, device=device)
    w = torch.randn(64, 64, 3, 3, device=device)
    backward = torch.ops.aten.convolution_backward.default

    def both(mask: list[bool]) -> Make:
        rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)
        return lambda: backward(x, x, w, None, *rest)

    ways = {
        "forward": lambda: F.conv2d(x, w, padding=1),
        "backward": both([True, True, False]),
        "weight gradient": both([False, True, False]),
        "data gradient": both([True, False, False]),
    }
    for setting, contexts in settings.items():
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            for way, make in ways.items():
                seconds, workspace = timed(device, make, repeats)
                yield {
                    "what": "convolution",
                    "way": way,
                    "setting": setting,
                    "s": seconds,
                    "workspace_bytes": workspace,
                }
