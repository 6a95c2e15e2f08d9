"""Work in lanes: each lane does its tasks one at a time, in the order in which they were issued."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def computed_at(tasks: Sequence[Task]) -> float:
    """When compute has done the last of ``tasks``, which have been `run`; 0 where it has none."""
    return next((task.end for task in reversed(tasks) if task.lane is Lane.COMPUTE), 0.0)


def run(tasks: Iterable[Task]) -> None:
    """Run ``tasks``, given in issue order, and note in each when it started and ended.

    A task starts when it is the first of its lane and all tasks that it comes ``after`` have
    ended. As those were issued before it, some lane can always go on until all are done.

    Only copies that share a path change how long others take. So lanes without copies go on as far
    as they can, and events are those of copies alone: whatever is blocked then waits for a copy
    that has not ended, and can start none before the next event.
    """
    lanes: dict[Lane, _Queue] = {}
    for task in tasks:
        lanes.setdefault(task.lane, _Queue([])).tasks.append(task)
    copying = [it for it in lanes.values() if any(task.link is not None for task in it.tasks)]
    others = [it for it in lanes.values() if it not in copying]
    running: list[Task] = []
    _go_on(others)
    while True:
        heads = [(it, it.start()) for it in copying if not it.busy]
        times = [task.end for task in running] + [at for _, at in heads if at is not None]
        if not times:
            return
        now = min(times)
        ended = [task for task in running if task.end <= now]
        if ended:
            running = [task for task in running if task.end > now]
            for task in ended:
                task.done = True
                lanes[task.lane].end(task)
            _go_on(others)
        else:
            # Nothing has ended, so whatever is blocked still is.
            running += [it.begin(now) for it, at in heads if at == now]
        _share_links(running, now)


def _go_on(lanes: Sequence[_Queue]) -> None:
    """Let lanes without copies go on as far as they can; one that does may let another one."""
    while any(lane.advance() for lane in lanes):
        pass


@dataclass(slots=True, eq=False)
class _Queue:
    """The tasks of a lane; ``at`` is the first that has not begun, ``free`` when it may at best."""

    tasks: list[Task]
    at: int = 0
    free: float = 0.0
    busy: bool = False

    def start(self) -> float | None:
        """When the next task starts; None if there is none, or if that is not known yet."""
        if self.at == len(self.tasks):
            return None
        begun = self.free
        for other in self.tasks[self.at].after:
            if not other.done:
                return None
            begun = max(begun, other.end)
        return begun

    def begin(self, now: float) -> Task:
        """Start the next task, which ends when `end` is told so."""
        task = self.tasks[self.at]
        self.at, self.busy = self.at + 1, True
        task.start, task.end = now, now + task.seconds
        return task

    def end(self, task: Task) -> None:
        """The lane is free from the end of its task on."""
        self.free, self.busy = task.end, False

    def advance(self) -> bool:
        """Run all tasks whose start is known; nothing changes how long they take."""
        tasks, at, free = self.tasks, self.at, self.free
        for index in range(at, len(tasks)):
            task = tasks[index]
            begun = free
            for other in task.after:
                if not other.done:
                    break
                if other.end > begun:
                    begun = other.end
            else:
                task.start, task.end, task.done = begun, begun + task.seconds, True
                at, free = index + 1, task.end
                continue
            break
        advanced = at > self.at
        self.at, self.free = at, free
        return advanced


def _share_links(running: list[Task], now: float) -> None:
    """Let copies that share a path go on at the rate measured with both directions busy."""
    links = [(task, task.link) for task in running if task.link is not None]
    for task, link in links:
        shared = any(other.path == link.path for mate, other in links if mate is not task)
        rate = duplex_share(link) if shared else 1.0
        if rate != task.rate:
            task.end = now + (task.end - now) * task.rate / rate
            task.rate = rate


def duplex_share(link: Link) -> float:
    """Part of its lone rate that ``link`` keeps while the other direction is busy, at most 1."""
    return min(1.0, link.duplex_bytes_per_s / link.bytes_per_s)
