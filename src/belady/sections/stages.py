"""What a stretch consists of: steps, and stages between which all slices meet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from belady.errors import SectionError
from belady.forwards import is_patched, plain_forward
from belady.sections.batchnorm import BatchNorm, uses_batch_statistics
from belady.sections.dropout import draws_for_all

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """A module of a stretch that is called as a whole, and how it is called."""

    module: nn.Module
    call: Callable[[Tensor], Any]


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps that a slice takes without waiting for the others.

    Attributes
    ----------
    norm
        BatchNorm that comes before the steps and needs the statistics of all slices.
    parameters
        Trainable parameters of the steps (not of ``norm``), as positions in those of the stretch.
    """

    norm: BatchNorm | None
    steps: tuple[Step, ...]
    parameters: tuple[int, ...]


def steps_of(modules: Iterable[nn.Module]) -> Iterator[Step]:
    """Steps of modules that are called one after another; what only calls others is taken apart."""
    for module in modules:
        if is_sequential(module) and not has_hooks(module):
            yield from steps_of(module.children())
        else:
            yield Step(module, module)


def own_steps(module: nn.Module) -> list[Step]:
    """Steps of the forward of ``module`` itself, without its hooks."""
    if type(module).forward is nn.Sequential.forward:
        return list(steps_of(module.children()))
    return [Step(module, plain_forward(module))]


def is_sequential(module: nn.Module) -> bool:
    """Whether a module does nothing but call its children one after another."""
    return type(module).forward is nn.Sequential.forward and not is_patched(module)


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody wants to see each call of the module."""
    return any(getattr(module, name) for name in _HOOKS)


def modules_in(steps: Iterable[Step]) -> list[nn.Module]:
    """Every module that the steps call, each once."""
    return list(dict.fromkeys(part for step in steps for part in step.module.modules()))


def refuse_unfit(name: str, steps: Sequence[Step]) -> None:
    """Raise if a module of a stretch cannot be called slice by slice, whatever its input.

    Raises
    ------
    SectionError
        Naming the module and the reason.
    """
    inside = {id(step.call.__self__) for step in steps if hasattr(step.call, "__self__")}
    for step in steps:
        for path, part in step.module.named_modules(prefix=type(step.module).__name__):
            reason = _unfit(part, part is step.module, id(part) in inside)
            if reason:
                raise SectionError(f"{name} cannot run in slices: {path} {reason}")


def _unfit(part: nn.Module, whole: bool, own: bool) -> str:
    """Why a module does not fit; ``own``: its hooks and patches are outside of the stretch."""
    if isinstance(part, nn.SyncBatchNorm):
        return "takes its statistics from other processes"
    if not own and has_hooks(part):
        return "has hooks, which would see slices instead of the batch; remove them first"
    if not own and is_patched(part):
        return "has another forward than its class"
    if isinstance(part, nn.modules.batchnorm._BatchNorm) and uses_batch_statistics(part):
        if type(part) not in BatchNorm.KINDS:
            return "is a batch norm with code of its own"
        if not whole:
            return (
                "needs the statistics of the whole batch in the middle of another module's forward"
            )
    drops = isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0
    if part.training and (drops or isinstance(part, nn.RReLU)):
        if own:
            return "is all of the section, and draws random numbers; name what is around it too"
        if not draws_for_all(part):
            return "draws random numbers, and slices would draw others than the batch"
    return ""


def split(steps: Iterable[Step], positions: dict[Tensor, int]) -> list[Stage]:
    """Cut steps into stages: each BatchNorm that takes statistics of the batch begins one.

    Parameters
    ----------
    positions
        Of the trainable parameters of the stretch, as its modules hold them.
    """
    stages: list[Stage] = []
    norm: BatchNorm | None = None
    taken: list[Step] = []
    for step in steps:
        if type(step.module) in BatchNorm.KINDS and uses_batch_statistics(step.module):
            stages.append(_stage(norm, taken, positions))
            norm, taken = BatchNorm(step.module, positions), []
        else:
            taken.append(step)
    stages.append(_stage(norm, taken, positions))
    return stages


def _stage(norm: BatchNorm | None, steps: list[Step], positions: dict[Tensor, int]) -> Stage:
    used = dict.fromkeys(
        positions[parameter]
        for step in steps
        for parameter in step.module.parameters()
        if parameter in positions
    )
    return Stage(norm, tuple(steps), tuple(used))


def run_steps(steps: Iterable[Step], tensor: Any) -> Any:
    """Call one step after another, as the modules would be called without sections."""
    for step in steps:
        tensor = step.call(tensor)
    return tensor


def foreign_leaf(edge: torch.autograd.graph.GradientEdge, known: set[int]) -> Tensor | None:
    """A tensor that gets a gradient from the graph at ``edge`` and is not among ``known`` (ids)."""
    seen: set[Any] = set()
    waiting: list[Any] = [edge.node]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name().endswith("AccumulateGrad"):
            variable: Tensor = node.variable
            if id(variable) not in known:
                return variable
        waiting += [following for following, _ in node.next_functions if following is not None]
    return None
