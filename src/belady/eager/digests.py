"""Whether replays came out as what was saved, found out without waiting for each of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Variable

from belady.errors import PlanMismatchError

_ROW = 4096
_task: Any = torch._C._current_graph_task_id


def digest(content: torch.Tensor) -> torch.Tensor:
    """Sums of the bytes along the rows and the columns of a table of 4 KiB rows."""
    whole = content.numel() // _ROW * _ROW
    table = content[:whole].view(torch.int32).view(-1, _ROW // 4)
    sums = [table.sum(dim, dtype=torch.int64) for dim in (0, 1)]
    return torch.cat([*sums, content[whole:].to(torch.int64)])


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
