"""Whether replays came out as what was saved, found out without waiting for each of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Variable

from belady.errors import PlanMismatchError
from belady.memory.lanes import current_stream

_WORD = 8
# Primes. One is taken that does not divide the number of words: then no sizes of a tensor are whole
# rows of the table, and some words are left over and compared as they are (a sign turned in all).
_COLUMNS = (1021, 1019, 1013, 1009, 997)
_task: Any = torch._C._current_graph_task_id


def digest(content: torch.Tensor) -> torch.Tensor:
    """Sums of words, each word in one of about 1,000 columns in turn, and the bytes left over.

    One pass over the bytes. Not seen: words that change places with others of their column, and
    changes that cancel each other out in one.
    """
    words = content.numel() // _WORD
    columns = next((count for count in _COLUMNS if words % count), _COLUMNS[0])
    whole = words // columns * columns * _WORD
    table = content[:whole].view(torch.int64).view(-1, columns)
    return torch.cat([table.sum(0), content[whole:].to(torch.int64)])


class Digests:
    """Compares digests of bytes before and after a replay.

    The device compares. The host asks once, when backward has ended, so nobody gets a gradient
    that a wrong replay went into; an optimizer that steps inside backward asks before its step.

    Attributes
    ----------
    refuted
        Whether any replay ever came out otherwise.
    wrong
        Why the gradients of the passes since `forget` cannot be used, or empty.
    """

    def __init__(self) -> None:
        self.refuted = False
        self.wrong = ""
        # One flag a stream: each is complete in the order of its own stream.
        self._differ: dict[Any, torch.Tensor] = {}
        self._task = -1

    def forget(self) -> None:
        """A pass begins: drop what one that came to nothing has left."""
        self._differ.clear()
        self.wrong = ""

    def compare(self, saved: torch.Tensor, replayed: torch.Tensor) -> None:
        """Compare the digest of a saved value with that of its replay.

        Raises
        ------
        PlanMismatchError
            If they differ and no backward is under way.
        """
        stream = current_stream(saved.device)
        differ = saved.ne(replayed).any()
        known = self._differ.get(stream)
        self._differ[stream] = differ if known is None else differ.logical_or_(known)
        task = _task()
        if task == -1:
            self.demand_equal()
        elif task != self._task:
            self._task = task
            Variable._execution_engine.queue_callback(self.demand_equal)

    def demand_equal(self) -> None:
        """Wait for all comparisons so far.

        Raises
        ------
        PlanMismatchError
            If a replay came out otherwise.
        """
        flags, self._differ = self._differ, {}
        for stream, differ in flags.items():
            if stream is not None:
                torch.cuda.current_stream(stream.device.index).wait_stream(stream)
            if differ.item() and not self.wrong:
                self.refute(
                    "bytes that forward saved were made again and came out otherwise: the program "
                    "computes something else than when it was observed"
                )
        if self.wrong:
            raise PlanMismatchError(self.wrong)

    def refute(self, why: str) -> None:
        """A replay cannot be right; the next `demand_equal` says so."""
        self.refuted = True
        self.wrong = (
            f"{why}. The gradients of this backward are wrong, and no optimizer has used them. Set "
            "them to zero and go on: nothing is recomputed any more. policy='lifetime' never "
            "recomputes"
        )
