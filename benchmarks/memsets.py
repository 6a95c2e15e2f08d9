"""What the verb ``kernels`` asks of CUDA graphs: what a memset between two kernels costs."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from statistics import median

import torch

from belady.memory.driver import LIBRARY
from belady.memory.memsets import Memsets, memsets_of
from benchmarks.cases import Record
from benchmarks.questions import Asked

# Of one graph.
_KERNELS = 500
# Of a counter that cuDNN zeroes, and of a small activation.
_BYTES = (4, 1 << 20)


def memsets(asked: Asked) -> Iterator[Record]:
    """Seconds from one kernel of a graph to the next, with and without a memset in between.

    None without CUDA.
    """
    if asked.device.type != "cuda":
        return
    torch.zeros(1, device=asked.device)  # has the driver know which device it is about
    edits = memsets_of(asked.device.index)
    ways = [("nothing", 0, None), *((f"{it} bytes, memset", it, None) for it in _BYTES)]
    ways += [] if edits is None else [(f"{it} bytes, kernel", it, edits) for it in _BYTES]
    for way, nbytes, edit in ways:
        yield {"what": "memset", "way": way, "s": _seconds(asked, nbytes, edit)}


def table(found: list[Record]) -> str:
    """A column for each thing in between."""
    ways = " | ".join(str(record["way"]) for record in found)
    cells = " | ".join(f"{record['s'] * 1e6:.1f}" for record in found)
    rule = "|---" * (len(found) + 1)
    return f"| in a CUDA graph, between two kernels | {ways} |\n{rule}|\n| µs | {cells} |\n"


def _seconds(asked: Asked, nbytes: int, edits: Memsets | None) -> float:
    """Median seconds of a kernel and of what follows it."""
    driver = ctypes.CDLL(LIBRARY)
    target = torch.empty(max(_BYTES), dtype=torch.uint8, device=asked.device)
    value, stream = torch.ones(1, device=asked.device), torch.cuda.Stream(asked.device)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    zero = ctypes.c_ubyte(0), ctypes.c_size_t(nbytes), ctypes.c_void_p(stream.cuda_stream)
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(_KERNELS):
            value.mul_(1.0)
            if nbytes and driver.cuMemsetD8Async(ctypes.c_uint64(target.data_ptr()), *zero):
                raise RuntimeError("CUDA's driver refused to capture a memset")
    if edits is not None:
        edits.become_kernels(graph.raw_cuda_graph())
    graph.replay()
    took = []
    for _ in range(asked.repeats):
        torch.cuda.synchronize(asked.device)
        begun = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize(asked.device)
        took.append((time.perf_counter() - begun) / _KERNELS)
    return median(took)
