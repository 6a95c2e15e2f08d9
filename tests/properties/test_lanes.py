"""Lanes against a run that looks at every moment at which anything ends."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from belady.ir.hardware import Link
from belady.ir.timeline import Lane
from belady.ir.trace import Tier
from belady.simulate.lanes import Task, duplex_share, run

OUT = Link(Tier.DEVICE, Tier.HOST, ((1, 4.0),), 3.0, 0.0, "pcie")
LINKS = {
    Lane.COPY_OUT: OUT,
    Lane.COPY_IN: replace(OUT, source=Tier.HOST, target=Tier.DEVICE, duplex_bytes_per_s=2.0),
    Lane.DISK_WRITE: Link(Tier.HOST, Tier.DISK, ((1, 2.0),), 1.0, 0.0, "disk"),
    Lane.DISK_READ: Link(Tier.DISK, Tier.HOST, ((1, 2.0),), 1.0, 0.0, "disk"),
}


@st.composite
def tasks(draw: st.DrawFn) -> list[Task]:
    """Work of all lanes; each comes after some that were issued before it."""
    made: list[Task] = []
    for _ in range(draw(st.integers(0, 30))):
        lane = draw(st.sampled_from((*Lane, *[Lane.HOST, Lane.COMPUTE] * 4)))
        after = draw(st.lists(st.sampled_from(made), max_size=3)) if made else []
        seconds = draw(st.sampled_from((0.0, 1.0, 1.5, 7.0)))
        made.append(Task(lane, seconds, tuple(after), link=LINKS.get(lane)))
    return made


def moment_by_moment(tasks: list[Task]) -> list[tuple[float, float]]:
    """Start and end of each task, in as simple a way as there is."""
    left = {index: task.seconds for index, task in enumerate(tasks)}  # of lone work
    number = {id(task): index for index, task in enumerate(tasks)}
    start: dict[int, float] = {}
    end: dict[int, float] = {}
    now = 0.0
    while len(end) < len(tasks):
        for index, task in enumerate(tasks):
            before = [i for i in range(index) if tasks[i].lane is task.lane]
            needed = [*before, *(number[id(other)] for other in task.after)]
            if index not in start and all(end.get(i, now + 1) <= now for i in needed):
                start[index] = now
            if index in start and left[index] <= 0:
                end.setdefault(index, now)
        running = [index for index in start if index not in end]
        rates = {index: rate_of(tasks, index, running) for index in running}
        step = min((left[index] / rates[index] for index in running), default=0.0)
        # The one that ends next has nothing left, whatever rounding says.
        for index in running:
            ends = left[index] / rates[index] <= step
            left[index] = 0.0 if ends else left[index] - step * rates[index]
        now += step
    return [(start[index], end[index]) for index in range(len(tasks))]


def rate_of(tasks: list[Task], index: int, running: list[int]) -> float:
    """How fast a task goes on among those that run."""
    link = tasks[index].link
    paths = [other.path for i in running if i != index and (other := tasks[i].link) is not None]
    return duplex_share(link) if link is not None and link.path in paths else 1.0


@given(tasks())
def test_every_task_runs_when_looking_at_every_moment_says(given: list[Task]) -> None:
    expected = moment_by_moment(given)
    run(given)
    for task, (start, end) in zip(given, expected, strict=True):
        assert abs(task.start - start) < 1e-9
        assert abs(task.end - end) < 1e-9
        assert task.done
