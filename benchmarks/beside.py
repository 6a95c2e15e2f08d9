"""What the verb ``kernels`` asks of links: what copies reach beside kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from statistics import median

import torch
import torch.nn.functional as F

from benchmarks.cases import Record
from benchmarks.questions import GIB, MIB, PRECISIONS, Asked, Make, precisely, timed

# Of one copy, and how many follow one another.
_BYTES = 64 * MIB
_COPIES = 24
# Kernels go on for this many times what the copies take alone, so that none runs beside nothing.
_LONGER = 3
WAYS = (("out",), ("in",), ("out", "in"))


def copies(asked: Asked) -> Iterator[Record]:
    """Rates of copies alone, one way and both ways, and beside kernels of each kind.

    None without CUDA, as nothing overlaps there.
    """
    if asked.device.type != "cuda":
        return
    for name, precision, make in _companions(asked):
        with nullcontext() if precision is None else precisely(precision, benchmark=True):
            for ways in WAYS:
                yield from _rates(asked, name, make, ways)


def _companions(asked: Asked) -> Iterator[tuple[str, str | None, Make | None]]:
    yield "nothing", None, None
    for precision in PRECISIONS:
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        like = {"device": asked.device, "dtype": dtype}
        x = torch.randn(asked.images, 64, asked.edge, asked.edge, **like)
        w = torch.randn(64, 64, 3, 3, **like)
        yield f"convolution, {precision}", precision, lambda x=x, w=w: F.conv2d(x, w, padding=1)
        yield f"its backward, {precision}", precision, lambda x=x, w=w: _backward(x, w)
    yield "relu", None, lambda x=x: torch.relu(x)


def _backward(x: torch.Tensor, weight: torch.Tensor) -> object:
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    return torch.ops.aten.convolution_backward.default(x, x, weight, None, *rest)


def _rates(asked: Asked, beside: str, make: Make | None, ways: tuple[str, ...]) -> Iterator[Record]:
    lanes = {way: _Lane(asked.device, outward=way == "out") for way in ways}
    alone = _seconds(lanes, asked.repeats, None, 0)
    kernels = 0
    if make is not None:
        seconds, _ = timed(asked.device, make, 3)
        kernels = 1 + int(_LONGER * max(alone.values()) / seconds)
    found = alone if make is None else _seconds(lanes, asked.repeats, make, kernels)
    for way, seconds in found.items():
        yield {
            "what": "copy",
            "way": way,
            "both": len(ways) > 1,
            "beside": beside,
            "s_per_gib": seconds * GIB / (_COPIES * _BYTES),
        }


def _seconds(
    lanes: Mapping[str, _Lane], repeats: int, make: Make | None, kernels: int
) -> dict[str, float]:
    """Median seconds of the copies of each lane."""
    rounds = [_round(lanes, make, kernels) for _ in range(repeats)]
    return {way: median(found[way] for found in rounds) for way in lanes}


def _round(lanes: Mapping[str, _Lane], make: Make | None, kernels: int) -> dict[str, float]:
    torch.cuda.synchronize()
    for _ in range(kernels):
        assert make is not None
        make()
    for _ in range(_COPIES):
        for lane in lanes.values():
            lane.copy()
    torch.cuda.synchronize()
    return {way: lane.seconds() for way, lane in lanes.items()}


class _Lane:
    """Copies one way, on a stream of their own."""

    def __init__(self, device: torch.device, *, outward: bool) -> None:
        host = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(_BYTES, dtype=torch.uint8, device=device)
        self._into, self._source = (host, there) if outward else (there, host)
        self._stream = torch.cuda.Stream(device)
        self._events: list[torch.cuda.Event] = []

    def copy(self) -> None:
        """Put one more copy in the stream."""
        with torch.cuda.stream(self._stream):
            if not self._events:
                self._mark()
            self._into.copy_(self._source, non_blocking=True)
            self._mark()

    def seconds(self) -> float:
        """From the first to the last copy; begins anew."""
        begun, *_, ended = self._events
        self._events = []
        return begun.elapsed_time(ended) / 1e3

    def _mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)
