"""Times, peaks and equality of a session."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import torch

from benchmarks.cases import Record
from benchmarks.live import LiveBytes
from benchmarks.memory import retries_so_far
from benchmarks.methods import Session

# What `digest` names: records with another word cannot be compared.
DIGEST_OF = "sha256 of each tensor's sha256"
# Hosts issue ops at half their speed for seconds at a time: so often both kinds of times are taken
# in turn, unless that many seconds have gone by.
_TURNS, _LONG = 3, 10.0
# Loops that tell at which speed the host is, how much slower than it has been it may be as a turn
# begins, and seconds that are given to it to become faster where it issues what a device computes.
_LOOPS, _SLOWER, _PATIENCE = 50_000, 1.25, 3.0


def timed(session: Session, repeats: int, known: Sequence[float] = ()) -> Record:
    """Times of single iterations, each waited for, and of as many in a row; peaks meanwhile.

    Of a device a turn of both begins when the host is about as fast as it has been before, or after
    some seconds of iterations that are not counted.

    Parameters
    ----------
    known
        What `pace` gave before.
    """
    cuda = session.work.setting.device == "cuda"
    before = _reset() if cuda else 0
    losses, seconds, rows = list[float](), list[float](), list[float]()
    first, paces = time.perf_counter(), [pace()]
    while len(rows) < _TURNS and (not rows or time.perf_counter() - first < _LONG):
        fastest = min([*known, *paces])
        patient = time.perf_counter() + (_PATIENCE if cuda else 0.0)
        while paces[-1] > _SLOWER * fastest and time.perf_counter() < patient:
            losses += session.iterate(1)
            paces.append(pace())
        for _ in range(repeats):
            begun = time.perf_counter()
            losses += session.iterate(1)
            seconds.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        losses += session.iterate(repeats)
        rows.append((time.perf_counter() - begun) / repeats)
        paces.append(pace())
    record: Record = {
        "seconds": seconds,
        "median_seconds": statistics.median(seconds),
        "rows": rows,
        "pipelined_seconds": statistics.median(rows),
        "host_loop_seconds": paces,
        "losses": losses,
    }
    return record | (_of_allocator(before) if cuda else _counted(session))


def pace() -> float:
    """Seconds that the host takes for the same work each time."""
    begun = time.perf_counter()
    for _ in range(_LOOPS):
        pass
    return time.perf_counter() - begun


def settled_peak(session: Session, iterations: int) -> Record:
    """Peaks and retries of a few iterations: all that a trial of a cap asks for."""
    if session.work.setting.device != "cuda":
        return _counted(session)
    before = _reset()
    session.iterate(iterations)
    return _of_allocator(before)


def kept(record: Record, cap: int | None) -> bool:
    """Whether measured iterations kept to the cap without flushing the allocator's cache."""
    if "allocation_retries" in record:
        return bool(record["allocation_retries"] == 0)
    return cap is None or record["peak_allocated_bytes"] <= cap


def _reset() -> int:
    """Start the allocator's peaks anew; gives its count of retries so far."""
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_peak_host_memory_stats()
    return retries_so_far()


def _of_allocator(retries_before: int) -> Record:
    stats, host = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
    used, source = _device_bytes()
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "allocation_retries": stats["num_alloc_retries"] - retries_before,
        "device_used_bytes": used,
        "device_used_source": source,
        "torch_pinned_bytes": host.get("allocated_bytes.peak", 0),
    }


def _device_bytes() -> tuple[int, str]:
    """Bytes in use on the device by all programs, context and libraries included."""
    with suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        name = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(name)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used), "nvml"
    free, total = torch.cuda.mem_get_info()
    return total - free, "cudaMemGetInfo"


def _counted(session: Session) -> Record:
    """One more iteration, counted op by op, or what the method has counted itself."""
    if session.own_peak is not None:
        return {"peak_allocated_bytes": session.own_peak(), "peak_source": "the method's own count"}
    with LiveBytes(session.work.persistent_tensors()) as live:
        session.iterate(1)
    return {"peak_allocated_bytes": live.peak_bytes, "peak_source": "live storages, op by op"}


def digest(session: Session, steps: int) -> str:
    """Name of the losses of ``steps`` iterations, and of all gradients and parameters then."""
    model, optimizer = session.work.model, session.work.optimizer
    losses: list[torch.Tensor] = []
    with _deterministic():
        torch.manual_seed(1)
        for _ in range(steps):
            optimizer.zero_grad()
            losses.append(session.backward().detach())
            optimizer.step()
    held = [tensor for p in model.parameters() for tensor in (p.detach(), p.grad)]
    # Hashing lets go of the interpreter; one thread takes longer than the steps.
    with ThreadPoolExecutor() as pool:
        parts = pool.map(_digest, (tensor for tensor in (*losses, *held) if tensor is not None))
        total = hashlib.sha256(b"".join(parts)).hexdigest()
    optimizer.zero_grad()
    return total


def _digest(tensor: torch.Tensor) -> bytes:
    # On the host first: copies of many tensors at once would count against a cap.
    flat = tensor.cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy()).digest()


@contextmanager
def _deterministic() -> Iterator[None]:
    """The same kernels every time, as far as torch has them."""
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = benchmark
