"""Whether replays came out as what was saved, found out without waiting for each of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Variable

from belady.errors import PlanMismatchError

_WORD = 8
# A prime, so that no power of two of bytes moves within its column when it moves by itself.
_COLUMNS = 1021
_task: Any = torch._C._current_graph_task_id


def digest(content: torch.Tensor) -> torch.Tensor:
    """Sums of words, each word in one of 1,021 columns in turn, and the bytes that are left over.

    One pass over the bytes. Not seen: words that change places with others of their column, and
    changes that cancel each other out in one.
    """
    whole = content.numel() // (_WORD * _COLUMNS) * (_WORD * _COLUMNS)
    table = content[:whole].view(torch.int64).view(-1, _COLUMNS)
    return torch.cat([table.sum(0), content[whole:].to(torch.int64)])


class Digests:
    """Compares digests of bytes before and after a replay.

    The device compares. The host asks once, when backward has ended, so nobody gets a gradient
    that a wrong replay went into; an optimizer that steps inside backward asks before its step.

    Attributes
    ----------
    refuted
        Whether any replay ever came out otherwise.
    """

    def __init__(self) -> None:
        self.refuted = False
        # One flag a stream: each is complete in the order of its own stream.
        self._differ: dict[Any, torch.Tensor] = {}
        self._task = -1

    def forget(self) -> None:
        """Drop what an iteration that came to nothing has left."""
        self._differ.clear()

    def compare(self, saved: torch.Tensor, replayed: torch.Tensor) -> None:
        """Compare the digest of a saved value with that of its replay.

        Raises
        ------
        PlanMismatchError
            If they differ and no backward is under way.
        """
        stream = torch.cuda.current_stream(saved.device) if saved.is_cuda else None
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
                torch.cuda.current_stream(stream.device).wait_stream(stream)
            if differ.item():
                self.refuted = True
        if flags and self.refuted:
            raise PlanMismatchError(
                "bytes that forward saved were made again and came out otherwise: the program "
                "computes something else than when it was observed. The gradients of this backward "
                "are wrong; parameters are untouched. Set the gradients to zero and go on: nothing "
                "is recomputed any more. policy='lifetime' never recomputes"
            )
