"""What the verb ``kernels`` asks of slices: what a convolution of the batch takes in so many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from math import inf

import torch

from belady.memory.allowance import allowance
from belady.memory.cap import enforce
from benchmarks.cases import Record
from benchmarks.questions import MIB, Asked, Make, precisely, timed

# Channels in and out of 3x3 convolutions of VGG-16, and into how many of these the edge goes.
_LAYERS = ((64, 64, 1), (128, 128, 2), (256, 256, 4), (512, 512, 8))
SLICES = (1, 4, 8, 16)
# Beyond what is there already, and what is made.
ROOMS_MIB = (None, 1024, 256)


def slices(asked: Asked) -> Iterator[Record]:
    """Seconds of all slices of a batch in fp32, forward and each gradient, by room beside them."""
    with precisely("fp32", benchmark=True), _in_pages(asked.device):
        for inward, outward, part in _LAYERS:
            edge = asked.edge // part
            for count in SLICES:
                samples = -(-asked.images // count)
                for room in ROOMS_MIB:
                    for way, make, nbytes in _ways(asked, inward, outward, edge, samples):
                        yield {
                            "what": "slice",
                            "way": way,
                            "channels": [inward, outward],
                            "edge": edge,
                            "batch": asked.images,
                            "samples": samples,
                            "room_mib": room,
                            "cudnn": torch.backends.cudnn.version(),
                            **_within(asked, make, count, room, nbytes),
                        }


@contextmanager
def _in_pages(device: torch.device) -> Iterator[None]:
    """Let torch give back free memory in pages, as under a budget.

    Of whole blocks, one that is in use in part would be room beyond what is allowed.
    """
    if device.type != "cuda":
        yield
        return
    undo = enforce(device, torch.cuda.get_device_properties(device).total_memory)
    try:
        yield
    finally:
        undo()


def _ways(
    asked: Asked, inward: int, outward: int, edge: int, samples: int
) -> Iterator[tuple[str, Make, int]]:
    """Forward and both gradients, with the bytes of what each makes."""
    x = torch.randn(samples, inward, edge, edge, device=asked.device)
    gradient = torch.randn(samples, outward, edge, edge, device=asked.device)
    weight = torch.randn(outward, inward, 3, 3, device=asked.device)
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    ops = torch.ops.aten
    yield "forward", lambda: ops.convolution.default(x, weight, None, *rest), gradient.nbytes
    for name, mask, made in (
        ("data gradient", [True, False, False], x),
        ("weight gradient", [False, True, False], weight),
    ):
        call = ops.convolution_backward.default
        yield name, partial(call, gradient, x, weight, None, *rest, mask), made.nbytes


def _within(asked: Asked, make: Make, count: int, room: int | None, nbytes: int) -> Record:
    limit = nullcontext() if room is None else allowance(asked.device, nbytes + room * MIB)
    with limit:
        try:
            make()  # cuDNN times its algorithms, and keeps what fits
            seconds, workspace = timed(asked.device, make, asked.repeats)
        except RuntimeError as error:
            return {"error": str(error).splitlines()[0]}
    return {"s": count * seconds, "workspace_bytes": workspace}


def table(found: list[Record]) -> str:
    """A row for each convolution, a column for each size of a slice and each room beside it."""
    columns: dict[tuple[int, float], str] = {}
    rows: dict[str, dict[str, str]] = {}
    for record in found:
        room = record["room_mib"]
        column = f"{record['samples']}, {'any room' if room is None else f'{room} MiB'}"
        columns[-record["samples"], -(inf if room is None else room)] = column
        inward, outward = record["channels"]
        name = f"{record['way']}, {inward} to {outward}, {record['edge']} pixels"
        rows.setdefault(name, {})[column] = _cell(record)
    order = [columns[key] for key in sorted(columns)]
    lines = [
        f"| {' | '.join([name, *(cells.get(column, '') for column in order)])} |\n"
        for name, cells in rows.items()
    ]
    head = f"| ms of the batch, MiB of workspace | {' | '.join(order)} |\n"
    return f"{head}{'|---' * (len(order) + 1)}|\n{''.join(lines)}"


def _cell(record: Mapping[str, object]) -> str:
    if "error" in record:
        return str(record["error"])
    seconds, nbytes = record["s"], record["workspace_bytes"]
    assert isinstance(seconds, float)
    assert isinstance(nbytes, int)
    return f"{seconds * 1e3:.1f}, {nbytes / MIB:.0f}"
