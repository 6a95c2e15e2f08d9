"""The demonstration: real digits, a residual network, plain and within a quarter of the memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from belady.errors import MissingExtraError, SpillError
from belady.ir.plan import Budget
from belady.ir.run import Run
from belady.ir.trace import Tier
from belady.memory.files import Files, check_folder
from belady.planners import smallest_budget
from belady.units import format_bytes, format_seconds, parse_bytes
from belady.virtual import Limits, VirtualMemory

Report = Callable[[str], None]

BATCH = 256
IMAGE = 16
CHANNELS = 32
TRAINING_SHARE = 0.8
LEARNING_RATE = 3e-3
# Few iterations: running statistics must follow the weights faster than by default.
NORM_MOMENTUM = 0.3
# What a kind of iteration takes until its peak has been verified.
VERIFIED_AFTER = 5
_NO_LIMIT = 2**62
_ROWS = 10
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@dataclass(frozen=True)
class Digits:
    """Images of handwritten digits and what they show, on the device of training."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Full batches in an order that is always the same, without end."""
        generator = torch.Generator().manual_seed(1)
        count = len(self.images)
        while True:
            order = torch.randperm(count, generator=generator).to(self.images.device)
            for start in range(0, count - BATCH + 1, BATCH):
                chosen = order[start : start + BATCH]
                yield self.images[chosen], self.labels[chosen]


class Training:
    """One network, its optimizer, and what came of them.

    Attributes
    ----------
    losses, seconds
        One each iteration.
    """

    def __init__(self, digits: Digits) -> None:
        self._digits = digits
        self._batches = digits.batches()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            self.model = network().to(digits.images.device)
        self._optimizer = torch.optim.Adam(self.model.parameters(), LEARNING_RATE)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def run(self, iterations: int, report: Report = lambda _: None) -> Training:
        """Train for so many iterations; ``report`` is told of every tenth."""
        for index in range(1, iterations + 1):
            begun = perf_counter()
            images, labels = next(self._batches)
            loss = F.cross_entropy(self.model(images), labels)
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.losses.append(loss.item())
            self.seconds.append(perf_counter() - begun)
            if index % 10 == 0 or index == iterations:
                report(f"  iteration {index} of {iterations}: loss {self.losses[-1]:.3f}")
        return self

    def accuracy(self) -> float:
        """Share of the test images that are recognised."""
        self.model.eval()
        with torch.no_grad():
            found = self.model(self._digits.test_images).argmax(1)
        self.model.train()
        return (found == self._digits.test_labels).float().mean().item()

    @property
    def typical_seconds(self) -> float:
        """Median duration of the later half of the iterations."""
        return median(self.seconds[len(self.seconds) // 2 :])


@dataclass(frozen=True)
class DemoResult:
    """What came of training twice.

    Attributes
    ----------
    differing
        Names of the weights and buffers that are not the same in every bit afterwards.
    plain_peak_bytes
        Device bytes held by the plain iteration at its peak.
    measured_peak_bytes
        The same within the budget (CUDA: bytes reserved); None when it was not verified.
    """

    plain_losses: tuple[float, ...]
    losses: tuple[float, ...]
    accuracies: tuple[float, float]
    differing: tuple[str, ...]
    plain_peak_bytes: int
    budget_bytes: int
    measured_peak_bytes: int | None
    seconds: tuple[float, float]
    report: str

    @property
    def same(self) -> bool:
        """Whether every loss, weight and buffer is the same bit for bit."""
        return self.plain_losses == self.losses and not self.differing

    @property
    def within(self) -> bool:
        """Whether the peak was measured and kept to the budget."""
        peak = self.measured_peak_bytes
        return peak is not None and peak <= self.budget_bytes

    @property
    def held(self) -> bool:
        """Whether everything that the demonstration promises came true."""
        return self.same and self.within

    def __str__(self) -> str:
        return "\n".join([*self._losses(), "", *self._figures(), "", self._closing()])

    def _losses(self) -> Iterator[str]:
        yield f"{'iteration':>9}  {'loss, plain':<14}  {'within budget':<14}"
        count = len(self.losses)
        for index in sorted({round(i * (count - 1) / (_ROWS - 1)) for i in range(_ROWS)}):
            plain, ours = self.plain_losses[index], self.losses[index]
            verdict = "same" if plain == ours else "DIFFERENT"
            yield f"{index + 1:>9}  {plain:<14.9g}  {ours:<14.9g}  {verdict}"

    def _figures(self) -> Iterator[str]:
        peak = self.measured_peak_bytes
        rows = (
            ("test accuracy", *(f"{share:.1%}" for share in self.accuracies)),
            ("time of an iteration", *map(format_seconds, self.seconds)),
            (
                "peak of the device",
                format_bytes(self.plain_peak_bytes),
                "not measured" if peak is None else format_bytes(peak),
            ),
            ("budget", "none", format_bytes(self.budget_bytes)),
        )
        yield f"{'':<22}{'plain':<14}within budget"
        for name, plain, ours in rows:
            yield f"{name:<22}{plain:<14}{ours}"

    def _closing(self) -> str:
        if self.held:
            assert self.measured_peak_bytes is not None
            share = self.measured_peak_bytes / self.plain_peak_bytes
            return (
                f"All held: {len(self.losses)} losses and every weight equal bit for bit, in "
                f"{share:.0%} of the memory."
            )
        failures = []
        if not self.same:
            failures.append(f"losses or weights differ ({', '.join(self.differing) or 'losses'})")
        if self.measured_peak_bytes is None:
            failures.append("the peak was not measured")
        elif not self.within:
            failures.append("the peak is over the budget")
        return f"NOT held: {'; '.join(failures)}."


def demo(
    device: str | None = None,
    *,
    budget: object = None,
    iterations: int = 30,
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
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    limits = Limits(_NO_LIMIT, spill_dir=_spill_dir(place), policy="baseline")
    given = None if budget is None else parse_bytes(budget)
    with _deterministic():
        digits = load_digits(place)
        report(
            f"{len(digits.images)} images of handwritten digits, batches of {BATCH}, on {place}; "
            f"{iterations} iterations each way from the same seed"
        )
        plain_peak, usual = _look(digits, limits)
        nbytes = usual if given is None else given
        report(f"plain PyTorch, which holds {format_bytes(plain_peak)} at its peak:")
        plain = Training(digits).run(iterations, report)
        report(f"within a budget of {format_bytes(nbytes)}:")
        ours = Training(digits)
        with VirtualMemory([ours.model], Limits(nbytes, spill_dir=limits.spill_dir)) as vm:
            ours.run(iterations, report)
            run, text = vm.run(), vm.report()
        return DemoResult(
            tuple(plain.losses),
            tuple(ours.losses),
            (plain.accuracy(), ours.accuracy()),
            tuple(_differing(plain.model, ours.model)),
            plain_peak,
            nbytes,
            _peak(run),
            (plain.typical_seconds, ours.typical_seconds),
            text,
        )


def load_digits(device: torch.device) -> Digits:
    """Digits that come with scikit-learn, enlarged and shuffled."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise MissingExtraError(
            "the demonstration needs scikit-learn for its images: pip install 'belady[demo]'"
        ) from error
    data: Any = datasets.load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    images = F.interpolate(images, (IMAGE, IMAGE), mode="bilinear")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order].to(device), torch.tensor(data.target)[order].to(device)
    first = int(TRAINING_SHARE * len(images))
    return Digits(images[:first], labels[:first], images[first:], labels[first:])


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, channels: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.first = _convolution(channels, outputs, 3, stride)
        self.second = _convolution(outputs, outputs, 3)
        same = channels == outputs and stride == 1
        self.around = nn.Identity() if same else _convolution(channels, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Add both ways."""
        return F.relu(self.second(F.relu(self.first(x))) + self.around(x))


def network() -> nn.Module:
    """A small residual network for digits."""
    return nn.Sequential(
        _convolution(1, CHANNELS, 3),
        nn.ReLU(),
        Block(CHANNELS, CHANNELS),
        Block(CHANNELS, CHANNELS),
        Block(CHANNELS, 2 * CHANNELS, stride=2),
        Block(2 * CHANNELS, 2 * CHANNELS),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * CHANNELS, 10),
    )


def _convolution(channels: int, outputs: int, kernel: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, outputs, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(outputs, momentum=NORM_MOMENTUM),
    )


def _look(digits: Digits, limits: Limits) -> tuple[int, int]:
    """Peak of plain training, and the budget that leaves a quarter of the saved bytes."""
    training = Training(digits)
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


def _differing(plain: nn.Module, ours: nn.Module) -> Iterator[str]:
    found = ours.state_dict()
    for name, tensor in plain.state_dict().items():
        if not torch.equal(tensor, found[name]):
            yield name


def _spill_dir(device: torch.device) -> str | None:
    """Folder on a disk: that for temporary files lies in memory on some systems."""
    if device.type != "cpu":
        return None
    for folder in (None, "/var/tmp", os.getcwd()):
        try:
            return check_folder(folder, Files(), allow_ram=False)
        except SpillError:
            continue
    raise SpillError("no folder on a disk was found for spilled bytes: set TMPDIR to one")


@contextmanager
def _deterministic() -> Iterator[None]:
    """The same kernels both times: bits can be compared then."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    workspace = os.environ.get(_WORKSPACE)
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
        if workspace is None:
            del os.environ[_WORKSPACE]
