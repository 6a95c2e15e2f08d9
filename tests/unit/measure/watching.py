"""Iterations watched on a CPU, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from belady.ir.files import dumps, loads, validate
from belady.ir.trace import Op, Save, Storage, Trace, Value
from belady.measure.clock import CpuClock, NoClock
from belady.measure.observation import Observation, watched

CPU = torch.device("cpu")


class Watch:
    """An iteration of ``modules`` under observation; saved tensors are copied and dropped."""

    def __init__(self, *modules: nn.Module, timed: bool = False) -> None:
        self.observation = Observation(CPU, CpuClock() if timed else NoClock(), modules)
        self.observation.start()
        self.recorder = self.observation.recorder

    @contextmanager
    def root(self, module: nn.Module, *args: Any) -> Iterator[None]:
        self.observation.enter_pass(module, (args, {}))
        with saved_tensors_hooks(*watched(self.recorder, _copied, _copied)):
            yield
        self.observation.leave_pass()

    def call(self, module: nn.Module, *args: Any) -> Any:
        with self.root(module, *args):
            return module(*args)

    def finish(self, optimizer: torch.optim.Optimizer | None = None) -> Trace:
        trace = self.observation.finish(optimizer)
        validate(trace)
        assert loads(Trace, dumps(trace)) == trace
        return trace


def _copied(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        return tensor.detach()
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return like.copy_(tensor.detach())


def pseudo_loss(result: Any) -> None:
    """Backward as a static trace does it."""
    torch.clear_autocast_cache()
    outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def observed(
    module: nn.Module, *args: Any, step: Callable[[], Any] | None = None, timed: bool = False
) -> Trace:
    """One iteration: forward, pseudo-loss, backward, ``step``."""
    watch = Watch(module, timed=timed)
    pseudo_loss(watch.call(module, *args))
    if step is not None:
        step()
    return watch.finish()


def names(trace: Trace) -> list[str]:
    return [op.name.removeprefix("aten.") for op in trace.ops]


def ops_named(trace: Trace, name: str) -> list[int]:
    return [i for i, op in enumerate(trace.ops) if op.name.removeprefix("aten.") == name]


def op_named(trace: Trace, name: str) -> tuple[int, Op]:
    (index,) = ops_named(trace, name)
    return index, trace.ops[index]


def saves_of(trace: Trace) -> list[tuple[Value, Save]]:
    """All saves in order of ordinal."""
    found = [(value, save) for value in trace.values for save in value.saves]
    return sorted(found, key=lambda pair: (pair[1].pass_index, pair[1].ordinal))


def storage_of(trace: Trace, value: Value) -> Storage:
    return trace.storages[value.storage]
