"""Learns of each convolution whether cuDNN can do it with less workspace, by making it do so.

The trial makes the choice, for all calls of those shapes on the thread that runs the op, and
PyTorch keeps it beside the usual one (`belady.memory.algorithms`). To have it run there is nothing
to do but to turn to the choices beside.

That turns all other convolutions too, for which cuDNN then chooses anew. What those take is seen in
an iteration under such a plan (`with_beside`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch

from belady.ir.trace import Algorithm, Op, Trace
from belady.measure.clock import Clock
from belady.measure.records import tensors_in
from belady.memory.algorithms import beside
from belady.memory.allowance import allowance, pages
from belady.planners.workspace import LEAN, USUAL, convolves

# Bytes of workspace that are not worth a trial.
LITTLE = 64 * 2**20
# By how much each try asks for less than the one before.
_STEP = 8
# A try makes cuDNN build one algorithm after another, which can take a second. After so many in one
# iteration no other convolution is tried.
_SECONDS = 3.0
_FORWARD, _BACKWARD = "aten.convolution.default", "aten.convolution_backward.default"
# Position of the dilation among the arguments.
_DILATION = {_FORWARD: 5, _BACKWARD: 6}

Limit = Callable[[torch.device, int], AbstractContextManager[None]]


@dataclass(slots=True)
class _Tried:
    """What is known of all calls of one key."""

    usual_bytes: int
    run: int | None = None  # number of the timed run with less workspace
    lean_bytes: int = 0


class Algorithms:
    """Trials of one observed iteration.

    Parameters
    ----------
    device
        Where the ops run.
    clock
        Brackets trials; one of its own.
    least_bytes
        Workspace from which on less would matter to the budget.
    limit
        Lets torch take so many bytes of the device and no more.
    """

    def __init__(
        self,
        device: torch.device,
        clock: Clock,
        least_bytes: int = LITTLE,
        limit: Limit = allowance,
    ) -> None:
        self._device = device
        self._least_bytes = max(least_bytes, LITTLE)
        self._spent = 0.0
        self._clock = clock
        self._limit = limit
        self._runs = 0
        self._tried: dict[Hashable, _Tried] = {}
        self._ops: dict[int, _Tried] = {}
        self._dilated = False

    def learn(
        self, op: int, call: tuple[Any, tuple[Any, ...], Any], result: Any, usual_bytes: int
    ) -> None:
        """Try the call of op ``op`` that has just been made with less than ``usual_bytes``.

        Parameters
        ----------
        call
            Function, arguments and keyword arguments.
        result
            Of the call; its bytes are left alone.
        """
        func, args, kwargs = call
        name = str(func)
        if name not in _DILATION:
            return
        # PyTorch runs these without cuDNN as soon as they are to be deterministic.
        self._dilated |= any(step != 1 for step in args[_DILATION[name]])
        if usual_bytes < self._least_bytes:
            return
        key = _key(name, args)
        if key not in self._tried:
            if self._spent > _SECONDS:
                return
            begun = perf_counter()
            tried = self._tried[key] = _Tried(usual_bytes)
            with beside():
                self._settle(tried, partial(func, *args, **kwargs), _bytes_of(result))
            self._spent += perf_counter() - begun
        self._ops[op] = self._tried[key]

    def found(self) -> dict[int, Algorithm]:
        """The way with less workspace of each op that has one. Waits for the device."""
        if self._dilated:
            return {}
        timings = self._clock.results()
        return {
            op: Algorithm(LEAN, timings[tried.run][0], tried.lean_bytes)
            for op, tried in self._ops.items()
            if tried.run is not None and tried.lean_bytes < tried.usual_bytes
        }

    def _settle(self, tried: _Tried, run: Callable[[], Any], output_bytes: int) -> None:
        """Ask for less and less until that is little or there is no such algorithm."""
        allowed = tried.usual_bytes // _STEP
        while True:
            try:
                with self._limit(self._device, output_bytes + allowed):
                    run()  # torch tries what cuDNN names, until one fits, and keeps it
                    self._timed(run)
            except RuntimeError:
                return  # also: out of memory, and nothing was kept of this try
            tried.run, tried.lean_bytes = self._runs - 1, self._clock.workspace
            if tried.lean_bytes < LITTLE or not allowed:
                return
            allowed = min(allowed, tried.lean_bytes) // _STEP

    def _timed(self, run: Callable[[], Any]) -> None:
        self._clock.start()
        self._runs += 1
        try:
            made = run()
        finally:
            self._clock.stop()
        del made


def knowing(op: Op, lean: Algorithm) -> Op:
    """The op with what it takes usually and beside as its algorithms, fastest first."""
    usual = Algorithm(USUAL, op.device_seconds, op.workspace_bytes)
    return replace(op, algorithms=fastest_first((usual, lean)))


def fastest_first(algorithms: Iterable[Algorithm]) -> tuple[Algorithm, ...]:
    """In the order of a Trace."""
    return tuple(sorted(algorithms, key=lambda algorithm: algorithm.device_seconds))


def with_beside(trace: Trace, seen: Trace) -> Trace | None:
    """The trace with what every convolution takes beside; None if ``seen`` does not tell.

    Parameters
    ----------
    seen
        An iteration under a plan for ``trace``, observed while cuDNN's choices beside held. Its
        other ops can differ, as its plan makes values again.
    """
    known, told = _convolutions(trace), _convolutions(seen)
    if not known or list(known.values()) != list(told.values()):
        return None
    ops = list(trace.ops)
    for index, other in zip(known, told, strict=True):
        ran = seen.ops[other]
        ops[index] = knowing(ops[index], Algorithm(LEAN, ran.device_seconds, ran.workspace_bytes))
    return replace(trace, ops=tuple(ops))


def _convolutions(trace: Trace) -> dict[int, Hashable]:
    """Each convolution in the order of issue, and what tells it from others."""

    def sizes(op: Op) -> tuple[int, ...]:
        return tuple(trace.storages[trace.values[value].storage].nbytes for value in op.writes)

    return {
        index: (op.name, op.phase, sizes(op)) for index, op in enumerate(trace.ops) if convolves(op)
    }


def _key(name: str, args: tuple[Any, ...]) -> Hashable:
    """What torch keeps a choice under, as far as it can differ within one iteration."""
    tensors = tuple((tuple(it.shape), tuple(it.stride()), it.dtype) for it in tensors_in(args[:3]))
    rest = tuple(str(arg) for arg in args[3:])
    return (name, threading.get_ident(), tensors, rest)


def _bytes_of(result: Any) -> int:
    return sum(pages(tensor.untyped_storage().nbytes()) for tensor in tensors_in((result,)))
