"""What the verb ``kernels`` asks of CUDA graphs: what a memset between two kernels costs."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch

from belady.memory.driver import LIBRARY
from benchmarks.cases import Record
from benchmarks.questions import Asked

Zero = Callable[[torch.Tensor], None]

# Of one graph.
_KERNELS = 500
# Of a counter that cuDNN zeroes, and of a small activation.
_BYTES = (4, 1 << 20)


def memsets(asked: Asked) -> Iterator[Record]:
    """Seconds from one kernel of a graph to the next, and with zeroes written in between.

    None without CUDA.
    """
    if asked.device.type != "cuda":
        return
    ways: list[tuple[str, int, Zero | None]] = [("nothing", 0, None)]
    ways += [(f"{it} bytes, memset", it, _by_memset) for it in _BYTES]
    ways += [(f"{it} bytes, kernel", it, _by_kernel) for it in _BYTES]
    for way, nbytes, zero in ways:
        yield {"what": "memset", "way": way, "s": _seconds(asked, nbytes, zero)}


def table(found: list[Record]) -> str:
    """A column for each thing in between."""
    ways = " | ".join(str(record["way"]) for record in found)
    cells = " | ".join(f"{record['s'] * 1e6:.1f}" for record in found)
    rule = "|---" * (len(found) + 1)
    return f"| in a CUDA graph, between two kernels | {ways} |\n{rule}|\n| µs | {cells} |\n"


def _by_memset(target: torch.Tensor) -> None:
    to, nbytes = ctypes.c_uint64(target.data_ptr()), ctypes.c_size_t(target.nbytes)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    if ctypes.CDLL(LIBRARY).cuMemsetD8Async(to, ctypes.c_ubyte(0), nbytes, stream):
        raise RuntimeError("CUDA's driver refused to capture a memset")


def _by_kernel(target: torch.Tensor) -> None:
    target.zero_()


def _seconds(asked: Asked, nbytes: int, zero: Zero | None) -> float:
    """Median seconds of a kernel and of what follows it."""
    target = torch.empty(nbytes, dtype=torch.uint8, device=asked.device)
    value = torch.ones(1, device=asked.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_KERNELS):
            value.mul_(1.0)
            if zero is not None:
                zero(target)
    graph.replay()
    took = []
    for _ in range(asked.repeats):
        torch.cuda.synchronize(asked.device)
        begun = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize(asked.device)
        took.append((time.perf_counter() - begun) / _KERNELS)
    return median(took)
