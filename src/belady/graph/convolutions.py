"""Convolutions whose algorithm cuDNN finds by trying (`torch.backends.cudnn.benchmark`).

PyTorch keeps what was found apart for each thread (the caches in its ``Conv_v8.cpp`` are
``thread_local``). Forward runs on the caller's thread, and replays in backward on autograd's. So a
replay may run another algorithm than the op did, and give other bits.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from belady.ir.plan import Plan, Recompute
from belady.ir.trace import Trace

REPLAYED = "replayed convolutions"
NOTE = (
    "convolutions are computed again in backward, and with torch.backends.cudnn.benchmark each "
    "thread finds its own algorithms: what is made again can differ in the last bits; with "
    "exact=True no convolution is computed again"
)


class Replayed:
    """Replays of convolutions: whether plans have them, and what users are told of those.

    Parameters
    ----------
    exact
        Whether no bit may change.
    """

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self.notes: list[str] = []

    def allowed(self, trace: Trace) -> Trace:
        """The trace, without those that may not be."""
        return kept(trace) if self._exact else trace

    def told(self, trace: Trace, plan: Plan) -> Plan:
        """The plan, which says of them; noted once."""
        plan = told(trace, plan)
        if REPLAYED in plan.numerics and NOTE not in self.notes:
            self.notes.append(NOTE)
        return plan


def kept(trace: Trace) -> Trace:
    """The trace without replays that may give other bits."""
    ops = (
        replace(op, replayable=False) if _varies(trace, index) else op
        for index, op in enumerate(trace.ops)
    )
    return replace(trace, ops=tuple(ops))


def told(trace: Trace, plan: Plan) -> Plan:
    """The plan, which says `REPLAYED` if a replay in it may give other bits."""
    replays = (it for it in plan.decisions.values() if isinstance(it, Recompute))
    if REPLAYED in plan.numerics or not any(_varies(trace, i) for it in replays for i in it.ops):
        return plan
    return replace(plan, numerics=(*plan.numerics, REPLAYED))


def _varies(trace: Trace, op: int) -> bool:
    tries = trace.device == "cuda" and torch.backends.cudnn.benchmark
    return tries and trace.ops[op].name == "aten.convolution.default"
