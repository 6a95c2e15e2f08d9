"""What came of training twice, and whether everything held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from belady.units import format_bytes, format_seconds

_ROWS = 10


class Both(NamedTuple):
    """One quantity of plain training and of training within the budget."""

    plain: float
    budget: float


@dataclass(frozen=True)
class DemoResult:
    """What came of training twice.

    Attributes
    ----------
    losses
        Of each iteration.
    differing
        Names of the weights and buffers that are not the same in every bit afterwards.
    plain_peak_bytes
        Device bytes held by the plain iteration at its peak.
    measured_peak_bytes
        The same within the budget (CUDA: bytes reserved); None when it was not verified.
    seconds
        Of a typical iteration.
    report
        What `belady.VirtualMemory.report` said.
    """

    losses: tuple[Both, ...]
    accuracy: Both
    seconds: Both
    differing: tuple[str, ...]
    plain_peak_bytes: int
    budget_bytes: int
    measured_peak_bytes: int | None
    report: str

    @property
    def same(self) -> bool:
        """Whether every loss, weight and buffer is the same bit for bit."""
        return all(plain == ours for plain, ours in self.losses) and not self.differing

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
        yield f"{'iteration':<22}{'loss, plain':<14}within budget"
        last = len(self.losses) - 1
        for index in sorted({round(row * last / (_ROWS - 1)) for row in range(_ROWS)}):
            plain, ours = self.losses[index]
            verdict = "same" if plain == ours else "DIFFERENT"
            yield f"{index + 1:<22}{plain:<14.9g}{ours:<14.9g}{verdict}"

    def _figures(self) -> Iterator[str]:
        peak = self.measured_peak_bytes
        rows = (
            ("test accuracy", *(f"{share:.1%}" for share in self.accuracy)),
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
        failures = list(self._failures())
        if failures or self.measured_peak_bytes is None:
            return f"NOT held: {'; '.join(failures)}."
        share = self.measured_peak_bytes / self.plain_peak_bytes
        return (
            f"All held: {len(self.losses)} losses and every weight are equal bit for bit, and "
            f"the peak is {share:.0%} of plain PyTorch's, within the budget."
        )

    def _failures(self) -> Iterator[str]:
        unequal = sum(plain != ours for plain, ours in self.losses)
        if unequal:
            yield f"{unequal} losses differ"
        if self.differing:
            yield f"weights differ ({', '.join(self.differing)})"
        if self.measured_peak_bytes is None:
            yield "the peak was not measured"
        elif not self.within:
            yield "the peak is over the budget"
