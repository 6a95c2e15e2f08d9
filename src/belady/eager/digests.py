"""Whether replays came out as what was saved, found out without waiting for each of them."""

from __future__ import annotations

import functools
from contextlib import suppress
from math import gcd
from typing import Any, NamedTuple

import torch
from torch.autograd import Variable

from belady.errors import ReplayError
from belady.ir.replay import COMPARED_ONE_IN
from belady.memory.geometry import unseen
from belady.memory.streams import current_stream

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_STEPS = range(901, 1101, 2)
_FEW = 1 << 15
_LEFT = 64
_AT_ONCE = 64
_SOME = "an op"
_OTHERWISE = (
    "bytes that forward saved were made again and came out otherwise, first those of {}: the "
    "program computes something else than when it was observed"
)
_LATE = (
    f"{_OTHERWISE}. This is known late: gradients of this iteration or of some before it, "
    f"{COMPARED_ONE_IN + 1} at most, were wrong, and an optimizer may have used them. Go on from a "
    "state saved before; nothing is recomputed any more. policy='lifetime' never recomputes, and "
    "exact=True compares everything before an optimizer steps"
)
_task: Any = torch._C._current_graph_task_id


def digest(content: torch.Tensor) -> torch.Tensor:
    """Sums of words, each word in one or two of about 1,000 columns in turn.

    One pass over the bytes. Not seen: words that change places with others of their column, and
    changes that cancel each other out in one.
    """
    nbytes = content.numel()
    dtype = next(dtype for dtype in _WORDS if nbytes % dtype.itemsize == 0)
    rows, columns, step = _table(nbytes // dtype.itemsize)
    table = content.view(dtype).as_strided((rows, columns), (step, 1))
    return table.sum(0, dtype=torch.int64)


@functools.lru_cache(maxsize=4096)
def _table(words: int) -> tuple[int, int, int]:
    """Rows, columns, and words from row to row; rows overlap, so that nothing is left over.

    The step has no divisor in common with the number of words: then it is no multiple of any size
    of the tensor, and samples that change places are seen. The number of rows is odd: in an even
    one the highest bits, all turned, would cancel each other out. And few words are not left over
    of the last row: of a square matrix with one row more than the step one would be, and each of
    its words would stay in its column when it is transposed.
    """
    tables = [(words // step, words % step, step) for step in _STEPS if gcd(words, step) == 1]
    odd = [table for table in tables if table[0] % 2]
    if words < 2 * _STEPS[-1] or (not odd and words < _FEW):
        return 1, words, words
    rows, more, step = min(odd or tables, key=lambda table: (table[1] < _LEFT, table[1]))
    return rows, step + more, step


class _Pairs:
    """Digests of one stream, before and after, and the point of the stream at which all exist."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.saved: list[torch.Tensor] = []
        self.replayed: list[torch.Tensor] = []
        self.made_by: list[str] = []
        self.stream = stream
        self.complete = None if stream is None else torch.cuda.Event()  # type: ignore[no-untyped-call]

    def add(self, saved: torch.Tensor, replayed: torch.Tensor, made_by: str) -> None:
        self.saved.append(saved)
        self.replayed.append(replayed)
        self.made_by.append(made_by)
        if self.complete is not None:
            self.complete.record(self.stream)

    def compared(self) -> torch.Tensor:
        """Whether all are equal, on the current stream and device."""
        starts = range(0, len(self.saved), _AT_ONCE)
        saved, replayed = (
            [torch.cat(digests[at : at + _AT_ONCE]) for at in starts]
            for digests in (self.saved, self.replayed)
        )
        same = [one.eq(other).all() for one, other in zip(saved, replayed, strict=True)]
        return torch.stack(same).all()

    def equal(self) -> bool:
        """Compare, on the current stream, and wait for that stream alone."""
        return bool(self.compared())

    def first_other(self) -> str:
        """What made the first bytes that came out otherwise, if that can be found; waits for it."""
        pairs = zip(self.saved, self.replayed, self.made_by, strict=True)
        with unseen(), suppress(RuntimeError):
            return next((it for one, other, it in pairs if not one.equal(other)), _SOME)
        return _SOME


class _Late(NamedTuple):
    """An answer that is on its way to the host, and what must stay in memory until it is there."""

    iteration: int
    equal: torch.Tensor
    there: torch.cuda.Event
    held: _Pairs


class Digests:
    """Compares digests of bytes before and after a replay.

    Asked ``at_once``, and until one iteration has come to its end, every replay is compared, and
    the host waits for the answer when backward has ended, so nobody gets a gradient that a wrong
    replay went into; an optimizer that steps inside backward asks before its step. Waiting leaves
    the device without work until the host has issued some again, and digests read all bytes twice.
    So from then on each replay is compared in one of `COMPARED_ONE_IN` iterations, and the answer
    is read when it is there: in the next iteration at the latest.

    Attributes
    ----------
    refuted
        Whether any replay ever came out otherwise.
    wrong
        Why the gradients of the passes since `forget` cannot be used, or empty.
    """

    def __init__(self, *, at_once: bool = True) -> None:
        self.refuted = False
        self.wrong = ""
        self._at_once = at_once
        self._proved = False
        self._iteration = 0
        self._pairs: dict[Any, _Pairs] = {}
        self._late: list[_Late] = []
        self._aside: torch.cuda.Stream | None = None
        self._task = -1

    def start_iteration(self) -> None:
        """An iteration begins."""
        self._iteration += 1
        self.forget()

    def finish_iteration(self) -> None:
        """It has come to its end; its replays were compared, all of them in the first."""
        self._proved = True

    def forget(self) -> None:
        """A pass begins: drop what one that came to nothing has left."""
        self._pairs.clear()
        self.wrong = ""

    def compares(self, value: int) -> bool:
        """Whether the replay of ``value`` is compared in this iteration."""
        return self._waits or (self._iteration + value) % COMPARED_ONE_IN == 0

    def compare(self, saved: torch.Tensor, replayed: torch.Tensor, made_by: str) -> None:
        """Compare the digest of a saved value with that of its replay.

        Parameters
        ----------
        made_by
            The op that made the value, as an error names it.

        Raises
        ------
        ReplayError
            If no backward is under way and they differ, as far as that is known.
        """
        stream = current_stream(saved.device)
        pairs = self._pairs.get(stream)
        if pairs is None:
            pairs = self._pairs[stream] = _Pairs(stream)
        pairs.add(saved, replayed, made_by)
        task = _task()
        if task == -1:
            self.demand_equal()
        elif task != self._task:
            self._task = task
            Variable._execution_engine.queue_callback(self.demand_equal)

    def demand_equal(self) -> None:
        """Ask for all comparisons so far, and demand of all that are known that they are equal.

        Raises
        ------
        ReplayError
            If a replay came out otherwise.
        """
        asked, self._pairs = self._pairs, {}
        for pairs in asked.values():
            try:
                with unseen():
                    equal = self._answer(pairs)
            except BaseException:
                # Also out of memory, or interrupted: nobody may go on with what was not compared.
                self.refute("bytes that forward saved were made again and could not be compared")
                raise
            if not equal and not self.wrong:
                # Before it is asked which, as that may be interrupted.
                self.refute(_OTHERWISE.format(_SOME))
                self.refute(_OTHERWISE.format(pairs.first_other()))
        self._hear(self._iteration)
        if self.wrong:
            raise ReplayError(self.wrong)

    def demand_known(self) -> None:
        """Demand of what was asked in earlier iterations that it was equal.

        Raises
        ------
        ReplayError
            If a replay came out otherwise.
        """
        if self._hear(self._iteration):
            raise ReplayError(self.wrong)

    def settle(self) -> None:
        """Wait for all answers that are on their way.

        Raises
        ------
        ReplayError
            If a replay came out otherwise.
        """
        if self._hear(self._iteration + 1):
            raise ReplayError(self.wrong)

    @property
    def _waits(self) -> bool:
        return self._at_once or not self._proved

    def _answer(self, pairs: _Pairs) -> bool:
        """Compare, on a stream that waits for the replays and nothing else; True if it is late."""
        if pairs.stream is None or pairs.complete is None:
            return pairs.equal()
        if self._aside is None:
            self._aside = torch.cuda.Stream(pairs.stream.device)  # type: ignore[no-untyped-call]
        self._aside.wait_event(pairs.complete)
        # The digests outlive the wait, so no stream can use their memory too early.
        with self._aside:
            if self._waits:
                return pairs.equal()
            equal = torch.empty((), dtype=torch.bool, pin_memory=True)
            equal.copy_(pairs.compared(), non_blocking=True)
            there = self._aside.record_event()
        self._late.append(_Late(self._iteration, equal, there, pairs))
        return True

    def _hear(self, iteration: int) -> bool:
        """Read the answers that are there, and wait for those of iterations before ``iteration``.

        True if one of them says that a replay came out otherwise.
        """
        wrong = False
        while self._late:
            late = self._late[0]
            if late.iteration < iteration:
                late.there.synchronize()
            elif not late.there.query():  # type: ignore[no-untyped-call]
                break
            with unseen():
                equal = bool(late.equal)
            if not equal and not wrong:
                wrong = self.refuted = True
                self.wrong = _LATE.format(_SOME)
                self.wrong = _LATE.format(late.held.first_other())
            self._late.pop(0)
        return wrong

    def refute(self, why: str) -> None:
        """A replay cannot be right; the next `demand_equal` says so."""
        self.refuted = True
        self.wrong = (
            f"{why}. The gradients of this backward are wrong, and no optimizer has used them. Set "
            "them to zero and go on: nothing is recomputed any more. policy='lifetime' never "
            "recomputes"
        )
