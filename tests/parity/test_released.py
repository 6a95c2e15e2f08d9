"""Bytes really held, op by op, are never more than a plan says.

An observed iteration shows to an anchor where nobody but autograd holds a value any more. What is
made again is held by nobody, and goes before that.
"""

from __future__ import annotations

import pytest

import belady
from belady.ir.curves import curve
from belady.ir.trace import Tier
from belady.measure import verification
from belady.measure.observation import Observation
from belady.measure.observe import held_bytes
from tests.parity.racing import replaying
from tests.support.models import CNN, GPT, LSTM, Task
from tests.support.training import Training, plain


@pytest.mark.parametrize("again", [False, True], ids=["copied", "made again"])
@pytest.mark.parametrize("task", [CNN, GPT, LSTM], ids=str)
def test_no_more_is_held_than_the_plan_says(
    monkeypatch: pytest.MonkeyPatch, task: Task, again: bool
) -> None:
    held: list[list[int]] = []
    peak_bytes = Observation.peak_bytes

    def counted(self: Observation, round_bytes: int) -> int:
        held.append(held_bytes(self.recorder, round_bytes))
        return peak_bytes(self, round_bytes)

    monkeypatch.setattr(Observation, "peak_bytes", counted)
    if again:
        monkeypatch.setattr(verification, "make_plan", replaying)
    training = Training(task)
    policy = "hybrid" if again else "floor"
    with belady.virtualize(training.models, "1GiB", policy=policy) as vm:
        training.run(plain, range(6))
        run = vm.run()
    assert run is not None
    assert run.measured is not None
    said = curve(run.trace, run.plan, run.hardware.allocator)
    assert all(really <= most for really, most in zip(held[0], said, strict=True))
    peak, foretold = run.measured.peak(Tier.DEVICE), run.plan.predicted_peak_bytes
    assert peak == max(held[0])
    assert peak <= foretold if again else peak == foretold
