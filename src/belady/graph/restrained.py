"""Convolutions of watched iterations choose their algorithms as a plan will leave them room."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from belady.graph.direct import function_of
from belady.graph.kinds import Force
from belady.measure.restraint import CONVOLUTIONS, Restrained

_FUNCTIONS = [(function_of(op), op) for op in CONVOLUTIONS]


def restrained(force: Force, device: torch.device, nbytes: int) -> Force:
    """The same, whose convolutions leave so many bytes of the budget, see `Restrained`."""
    if not nbytes:
        return force
    issue = Restrained(device, nbytes)

    def instead(constant: Any) -> Any:
        op = next((op for function, op in _FUNCTIONS if function is constant), None)
        return constant if op is None else partial(_issued, issue, op)

    return replace(force, programs=tuple(it.with_constants(instead) for it in force.programs))


def _issued(issue: Restrained, op: Any, *args: Any, **kwargs: Any) -> Any:
    return issue(op, args, kwargs)
