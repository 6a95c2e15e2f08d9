"""Work in lanes: each lane does its tasks one at a time, in the order in which they were issued."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from belady.ir.hardware import Link
from belady.ir.timeline import Cause, Lane


@dataclass(slots=True, eq=False)
class Task:
    """One piece of work, and when it ran.

    Attributes
    ----------
    seconds
        Duration when nothing shares its link.
    after
        Tasks that must have ended before it starts; all were issued before it.
    op, value, nbytes
        What it is about; -1, -1 and 0 where there is none.
    link
        The link that a copy takes; None for other work.
    cause
        For a wait, the kind of the copy waited for; None for real work.
    start, end
        Seconds after the iteration began; `run` fills them in.
    rate
        Progress in seconds of lone work per second.
    """

    lane: Lane
    seconds: float
    after: tuple[Task, ...] = ()
    op: int = -1
    value: int = -1
    nbytes: int = 0
    link: Link | None = None
    cause: Cause | None = None
    start: float = 0.0
    end: float = 0.0
    rate: float = 1.0
    done: bool = False


def run(tasks: Iterable[Task]) -> None:
    """Run ``tasks``, given in issue order, and note in each when it started and ended.

    A task starts when it is the first of its lane and all tasks that it comes ``after`` have
    ended. As those were issued before it, some lane can always go on until all are done.
    """
    waiting: dict[Lane, deque[Task]] = {}
    for task in tasks:
        waiting.setdefault(task.lane, deque()).append(task)
    running: dict[Lane, Task] = {}
    now = 0.0
    while True:
        started = _start(waiting, running, now)
        if started:
            _share_links(running, now)
        if not running:
            return
        now = min([task.end for task in running.values()])
        ended = [task for task in running.values() if task.end <= now]
        for task in ended:
            task.done = True
            del running[task.lane]
        if any(task.link is not None for task in ended):
            _share_links(running, now)


def _start(waiting: dict[Lane, deque[Task]], running: dict[Lane, Task], now: float) -> bool:
    """Start all that can start; say whether a copy is among them."""
    copies = False
    again = True
    # A task without duration ends as it starts, and so may let tasks of other lanes start.
    while again:
        again = False
        for lane, queue in waiting.items():
            if lane in running:
                continue
            while queue and _ready(queue[0]):
                task = queue.popleft()
                task.start, task.end = now, now + task.seconds
                if task.end > now:
                    running[lane] = task
                    copies = copies or task.link is not None
                    break
                task.done = again = True
    return copies


def _ready(task: Task) -> bool:
    return all(other.done for other in task.after)


def _share_links(running: dict[Lane, Task], now: float) -> None:
    """Let copies that share a path go on at the rate measured with both directions busy."""
    links = [(task, task.link) for task in running.values() if task.link is not None]
    for task, link in links:
        shared = any(other.path == link.path for mate, other in links if mate is not task)
        rate = duplex_share(link) if shared else 1.0
        if rate != task.rate:
            task.end = now + (task.end - now) * task.rate / rate
            task.rate = rate


def duplex_share(link: Link) -> float:
    """Part of its lone rate that ``link`` keeps while the other direction is busy, at most 1."""
    return min(1.0, link.duplex_bytes_per_s / link.bytes_per_s)
