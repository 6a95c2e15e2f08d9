"""Traces of an iteration on a machine that is not here.

Ops, bytes and lifetimes are those of `belady.measure.static`: a forward and a backward on tensors
without bytes. Seconds are a roofline of the machine's nominal rates: an op takes the longer of

- its floating-point operations over the machine's rate (convolutions and matrix products, by the
  formulas in ``torch.utils.flop_counter``), and
- the bytes of all storages that it reads and of all that it writes, over the rate of device memory.

Ops that write nothing are views and take no time.

The host takes no time. No kernel of these machines reached its nominal rate, so that real
iterations were longer, and copies easier to hide, than here: slowdowns come out too large rather
than too small. No op has a workspace, and none has alternative algorithms.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from belady.ir.trace import Op, Trace
from belady.measure.batch import static_trace_with_batch
from belady.measure.held import with_state
from benchmarks.founders.machines import Machine
from benchmarks.workloads import Workload

_MOMENTUM_COPIES = 1


class _Flops(TorchDispatchMode):
    """Floating-point operations of every convolution and matrix product, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.counted.append((str(func), int(formula(*args, **kwargs, out_val=result))))
        return result


def flops(work: Workload) -> list[tuple[str, int]]:
    """Names and operations of the ops that have a formula, of one forward and backward."""
    arguments, _ = next(work.batches)
    with FakeTensorMode() as fake:
        state = {name: fake.from_tensor(value) for name, value in work.model.named_parameters()}
        state |= {name: fake.from_tensor(value) for name, value in work.model.named_buffers()}
        faked = [fake.from_tensor(argument) for argument in arguments]
        with _Flops() as mode, torch.autograd.set_multithreading_enabled(False):
            output = functional_call(work.model, state, tuple(faked))
            output.backward(torch.ones_like(output))
    return mode.counted


def observed_on(machine: Machine, trace: Trace, counted: list[tuple[str, int]]) -> Trace:
    """The trace with the seconds that the machine's nominal rates allow."""
    names = {name for name, _ in counted}
    if [op.name for op in trace.ops if op.name in names] != [name for name, _ in counted]:
        raise ValueError("trace and count are of different iterations")
    left = iter(counted)
    ops = []
    for op in trace.ops:
        work = next(left)[1] if op.name in names else 0
        by_bytes = _traffic(trace, op) / machine.bytes_per_s if op.writes else 0.0
        seconds = max(work / machine.flops_per_s, by_bytes)
        ops.append(replace(op, device_seconds=seconds, host_seconds=0.0, workspace_bytes=0))
    storages = tuple(
        replace(s, device="cuda") if s.device == trace.device else s for s in trace.storages
    )
    return replace(trace, device="cuda", ops=tuple(ops), storages=storages)


def slowed(trace: Trace, factor: float) -> Trace:
    """The trace on a machine on which every op takes so many times as long."""
    ops = (replace(op, device_seconds=op.device_seconds * factor) for op in trace.ops)
    return replace(trace, ops=tuple(ops))


def touched_bytes(trace: Trace, op: Op) -> int:
    """Bytes of all storages that the op reads or writes, each once: what it needs at once."""
    return _bytes(trace, (*op.reads, *op.writes))


def _traffic(trace: Trace, op: Op) -> int:
    return _bytes(trace, op.reads) + _bytes(trace, op.writes)


def _bytes(trace: Trace, values: Iterable[int]) -> int:
    storages = {trace.values[value].storage for value in values}
    return sum(trace.storages[storage].nbytes for storage in storages)


def static(work: Workload) -> Trace:
    """One iteration without seconds, with the momentum that SGD keeps."""
    arguments, _ = next(work.batches)
    device = torch.device(work.setting.device)
    trace = static_trace_with_batch(work.model, (arguments, {}), device)
    return with_state(trace, _MOMENTUM_COPIES)
