"""Train plainly, train within a budget, compare."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from belady.demo.digits import BATCH, Digits, Report, Training, load_digits
from belady.demo.result import Both, DemoResult
from belady.eager.limits import Limits
from belady.errors import SpillError
from belady.ir.plan import Budget
from belady.ir.run import Run
from belady.ir.trace import Tier
from belady.memory.files import Files, check_folder
from belady.planners import smallest_budget
from belady.units import format_bytes, parse_bytes
from belady.virtual import VirtualMemory

# What a kind of iteration takes until its peak has been verified.
VERIFIED_AFTER = 5
_NO_LIMIT = 2**62
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def demo(
    device: str | None = None,
    *,
    budget: object = None,
    iterations: int = 30,
    engine: str = "eager",
    report: Report = print,
) -> DemoResult:
    """Train the same network plainly and within a budget, and compare.

    Parameters
    ----------
    device
        None is the GPU, or the CPU where there is none.
    budget
        Bytes; None is what everything but the saved values needs, and a quarter of those.
    iterations
        Of each training; the peak is known after `VERIFIED_AFTER`.
    engine
        What carries the plan out; one that leaves bits as they are.
    report
        Told of progress, line by line.

    Raises
    ------
    MissingExtraError
        If scikit-learn, which brings the digits, is not installed.
    BudgetError
        If the budget cannot be read.
    InfeasibleBudgetError
        If no plan fits the budget given.
    SpillError
        On a CPU, if no folder for spilled bytes lies on a disk.
    """
    given = None if budget is None else parse_bytes(budget)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    spill_dir = spill_folder() if place.type == "cpu" else None
    with _deterministic():
        digits = load_digits(place)
        report(
            f"{len(digits.images)} images of handwritten digits, batches of {BATCH}, on {place}; "
            f"{iterations} iterations each way from the same seed"
        )
        peak, usual = look(digits, spill_dir)
        nbytes = usual if given is None else given
        report(f"plain PyTorch, which holds {format_bytes(peak)} at its peak:")
        plain = Training(digits).run(iterations, report)
        weights, accuracy = plain.weights(), plain.accuracy()
        losses, seconds = plain.losses, plain.typical_seconds
        del plain
        report(f"within a budget of {format_bytes(nbytes)}:")
        ours = Training(digits)
        with VirtualMemory(
            [ours.model], Limits(nbytes, spill_dir=spill_dir, engine=engine, exact=True)
        ) as vm:
            ours.run(iterations, report)
            run, text = vm.run(), vm.report()
        return DemoResult(
            tuple(map(Both, losses, ours.losses)),
            Both(accuracy, ours.accuracy()),
            Both(seconds, ours.typical_seconds),
            tuple(differing(weights, ours.weights())),
            peak,
            nbytes,
            _peak(run),
            text,
        )


def differing(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Iterator[str]:
    """Names of the tensors that are not the same in every bit."""
    for name, tensor in expected.items():
        if tensor.numpy().tobytes() != found[name].numpy().tobytes():
            yield name


def look(digits: Digits, spill_dir: str | None) -> tuple[int, int]:
    """Peak of plain training, and the budget that leaves a quarter of the saved bytes."""
    training = Training(digits)
    limits = Limits(_NO_LIMIT, spill_dir=spill_dir, policy="baseline")
    with VirtualMemory([training.model], limits) as vm:
        training.run(VERIFIED_AFTER)
        run = vm.run()
    if run is None or run.measured is None:
        raise RuntimeError(f"{VERIFIED_AFTER} iterations were not enough to see one")
    trace, hardware = run.trace, run.hardware
    storages = {trace.values[value].storage for value in trace.saved}
    saved = sum(hardware.allocator.held(trace.storages[s].nbytes) for s in storages)
    peak = run.measured.peak(Tier.DEVICE)
    wanted = hardware.allocator.budget_for(peak - saved + saved // 4)
    return peak, max(wanted, smallest_budget("auto", trace, hardware, Budget(0)))


def _peak(run: Run | None) -> int | None:
    if run is None or run.measured is None:
        return None
    return max(run.measured.peak(Tier.DEVICE), run.measured.reserved_bytes)


def spill_folder() -> str:
    """Folder on a disk: that for temporary files lies in memory on some systems."""
    for folder in (None, "/var/tmp", os.getcwd()):
        try:
            return check_folder(folder, Files(), allow_ram=False)
        except SpillError:
            continue
    raise SpillError("no folder on a disk was found for spilled bytes: set TMPDIR to one")


@contextmanager
def _deterministic() -> Iterator[None]:
    """The same kernels both times: bits can be compared then."""
    cudnn = torch.backends.cudnn
    deterministic: Any = torch.utils.deterministic  # an object in the place of a module
    before = (
        torch.are_deterministic_algorithms_enabled(),
        cudnn.benchmark,
        deterministic.fill_uninitialized_memory,
    )
    workspace = os.environ.get(_WORKSPACE)
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    cudnn.benchmark = False
    # It would fill every new tensor, and time that.
    deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        cudnn.benchmark = before[1]
        deterministic.fill_uninitialized_memory = before[2]
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)
