"""A recorded iteration: every copy, wait and anchor, and the same results."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

import pytest
import torch

import belady
from belady.ir.run import Run
from belady.ir.timeline import Cause, Lane, Measured, Stall
from belady.ir.trace import Tier
from belady.measure import events
from belady.measure.events import _without, with_events
from belady.memory.lanes import lanes_for
from belady.memory.tape import END, Anchor, Tape

COPYING = (Lane.COPY_OUT, Lane.COPY_IN, Lane.DISK_WRITE, Lane.DISK_READ)
Hole = tuple[float, float]
NOTHING = Measured(1, 1.0, (1.0,), ())


def trained(
    device: str, *, recorded: bool, iterations: int = 9, policy: str = "floor"
) -> tuple[Run, list[float]]:
    torch.manual_seed(0)
    layers = [(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(6)]
    model = torch.nn.Sequential(*(part for pair in layers for part in pair)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(1024, 256, device=device)
    losses = []
    with belady.virtualize(model, "1GiB", policy=policy) as vm:
        if recorded:
            vm.record()
        for _ in range(iterations):
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        run = vm.run()
    assert run is not None
    return run, losses


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_every_byte_that_moved_is_a_span(device: str) -> None:
    run, _ = trained(device, recorded=True)
    measured = run.measured
    assert measured is not None
    assert measured.level == 2
    moved = {m.lane: (m.nbytes, m.copies) for m in measured.moved}
    spans = [span for span in measured.spans if span.lane in COPYING]
    assert Counter(span.lane for span in spans) == {k: copies for k, (_, copies) in moved.items()}
    sizes = [storage.nbytes for storage in run.trace.storages]
    for lane, (nbytes, _) in moved.items():
        values = [run.trace.values[span.value] for span in spans if span.lane is lane]
        assert sum(sizes[value.storage] for value in values) == nbytes
    assert {span.value for span in spans} == set(run.plan.decisions)


def test_what_moves_nothing_is_recorded_too(device: str) -> None:
    run, _ = trained(device, recorded=True, policy="baseline")
    measured = run.measured
    assert run.plan.moves_nothing
    assert measured is not None
    assert measured.level == 2
    assert {span.lane for span in measured.spans} == {Lane.COMPUTE, Lane.HOST}
    assert measured.stalls == ()


def test_spans_of_compute_follow_one_another_and_leave_room_for_stalls(device: str) -> None:
    run, _ = trained(device, recorded=True)
    assert run.measured is not None
    compute = [span for span in run.measured.spans if span.lane is Lane.COMPUTE]
    assert compute
    assert all(one.end_s <= two.start_s + 1e-6 for one, two in pairwise(compute))
    assert all(span.start_s >= 0 and span.end_s >= span.start_s for span in run.measured.spans)
    busy = sum(span.end_s - span.start_s for span in compute)
    waited = sum(stall.seconds for stall in run.measured.stalls)
    whole = max(span.end_s for span in run.measured.spans)
    assert busy + waited == pytest.approx(whole, rel=0.05)
    assert {stall.value for stall in run.measured.stalls} <= set(run.plan.decisions)
    lane = sorted((item.start_s, item.end_s) for item in (*compute, *run.measured.stalls))
    assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(lane))


def test_recording_changes_no_bit_and_ends(device: str) -> None:
    run, losses = trained(device, recorded=True, iterations=12)
    plain, expected = trained(device, recorded=False, iterations=12)
    assert losses == expected
    assert plain.measured is not None
    assert plain.measured.level == 1
    assert plain.measured.spans == ()
    assert lanes_for(device).timed is False
    assert belady.ir.loads(Run, belady.ir.dumps(run)) == run


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bytes_held_stay_within_the_peak() -> None:
    run, _ = trained("cuda", recorded=True)
    assert run.measured is not None
    assert run.measured.held
    assert max(held.nbytes for held in run.measured.held) <= run.measured.peak(Tier.DEVICE)


class Clock:
    """Lanes whose ticks are numbers of our own; the tape itself takes two at its start."""

    device = torch.device("cpu")

    def __init__(self, *ticks: float) -> None:
        self.ticks = [0.0, 0.0, *ticks]

    def tick(self) -> object:
        return str(self.ticks.pop(0))

    def seconds(self, start: object, end: object) -> float:
        return float(str(end)) - float(str(start))


def test_a_wait_is_cut_out_of_compute() -> None:
    tape = Tape(Clock(2.0, 10.0))  # type: ignore[arg-type]
    tape.anchor(3)
    tape.waited(Lane.COPY_IN, 7, ("4.0", "5.0"))
    tape.anchor(END)
    measured = with_events(NOTHING, tape)
    spans = [(s.start_s, s.end_s, s.op) for s in measured.spans if s.lane is Lane.COMPUTE]
    assert spans == [(0.0, 2.0, 0), (2.0, 4.0, 3), (5.0, 10.0, 3)]
    assert measured.stalls == (Stall(Cause.COPY_IN, 3, 7, 1.0, 4.0),)


def taped(waits: list[tuple[float, float]], anchors: list[float]) -> Tape:
    """A tape with waits and anchors at seconds after its start."""
    tape = Tape(lanes_for("cpu"))
    begun = tape.anchors[0].host
    tape._host_start = begun
    for start, end in waits:
        tape.waited(Lane.COPY_IN, 0, (begun + start, begun + end))
    tape.anchors = [
        Anchor(boundary, begun + at, begun + at, 0) for boundary, at in enumerate(anchors)
    ]
    return tape


@pytest.mark.parametrize("seed", range(20))
def test_waits_that_overlap_are_cut_out_of_whatever_they_reach_into(seed: int) -> None:
    rng = random.Random(seed)
    waits = [(at, at + rng.choice([0, 1, 2, 9])) for at in rng.choices(range(40), k=12)]
    measured = with_events(NOTHING, taped([*waits], [0.0, *sorted(rng.sample(range(50), 9)), 50.0]))
    found: Counter[int] = Counter()
    for span in measured.spans:
        if span.lane is Lane.COMPUTE:
            found.update(range(round(span.start_s), round(span.end_s)))
    waited = {second for start, end in waits for second in range(start, end)}
    assert found == Counter(set(range(50)) - waited)


def test_events_of_a_deep_network_are_worked_out_in_proportion_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[int] = []

    def counted(start: float, end: float, holes: Iterable[Hole]) -> Iterator[Hole]:
        holes = list(holes)
        looked_at.append(len(holes))
        return _without(start, end, holes)

    monkeypatch.setattr(events, "_without", counted)
    waits = [(at + 0.2, at + 0.4) for at in range(2000)]
    measured = with_events(NOTHING, taped(waits, [float(at) for at in range(2000)]))
    assert len(measured.stalls) == 2000
    # A wait between two anchors is looked at for these, and perhaps for their neighbours.
    assert 1999 <= sum(looked_at) <= 3 * 1999
