"""What a stretch consists of: a line of steps, and stages between which all slices meet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from belady.errors import SectionError
from belady.forwards import is_patched, plain_forward
from belady.sections.batchnorm import BatchNorm, uses_batch_statistics
from belady.sections.dropout import draws_for_all
from belady.sections.tracing import Step, trace

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Line:
    """Calls one after another, and the number of the value that comes out."""

    steps: tuple[Step, ...]
    result: int


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps that a slice takes without waiting for the others.

    Attributes
    ----------
    norm
        BatchNorm that comes before the steps and needs the statistics of all slices.
    given, enters
        Value that goes into the norm, and the one that the stage begins with: what the norm makes,
        or what goes into the stretch.
    takes
        Other values that its steps read and earlier stages have.
    copies
        Those of them that modules read, which may save them once more.
    gives
        Values that its steps make and later stages need.
    lasts
        All values that are needed after it.
    steps
        The calls.
    drops
        For each of them, the values that nothing in the stage needs afterwards.
    parameters
        Trainable parameters of the steps (not of ``norm``), as positions in those of the stretch.
    """

    norm: BatchNorm | None
    given: int
    enters: int
    takes: tuple[int, ...]
    copies: frozenset[int]
    gives: tuple[int, ...]
    lasts: frozenset[int]
    steps: tuple[Step, ...]
    drops: tuple[tuple[int, ...], ...]
    parameters: tuple[int, ...]


def line_of(modules: Iterable[nn.Module]) -> Line:
    """Calls of modules that run one after another; what has a batch norm inside is taken apart."""
    steps: list[Step] = []
    value = 0
    for module in _in_sequence(modules):
        if is_taken_apart(module):
            found, value = trace(module, is_taken_apart, value, len(steps) + 1)
            steps += found
        else:
            steps.append(_whole(module, value, len(steps) + 1))
            value = len(steps)
    return Line(tuple(steps), value)


def own_line(module: nn.Module) -> Line:
    """Calls of the forward of ``module`` itself, without its hooks."""
    if type(module).forward is nn.Sequential.forward:
        return line_of(module.children())
    if _has_norm_inside(module):
        steps, result = trace(module, is_taken_apart, 0, 1)
        return Line(tuple(steps), result)
    step = replace(_whole(module, 0, 1), call=plain_forward(module))
    return Line((step,), 1)


def is_taken_apart(module: nn.Module) -> bool:
    """Whether the calls that a module makes become steps, since slices must meet between them."""
    return _has_norm_inside(module) and not has_hooks(module) and not is_patched(module)


def _in_sequence(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for module in modules:
        if is_sequential(module) and not has_hooks(module):
            yield from _in_sequence(module.children())
        else:
            yield module


def _whole(module: nn.Module, reads: int, makes: int) -> Step:
    return Step(module, type(module).__name__, module, (reads,), makes)


def _has_norm_inside(module: nn.Module) -> bool:
    return any(_is_barrier(part) for part in module.modules() if part is not module)


def _is_barrier(module: nn.Module) -> bool:
    return type(module) in BatchNorm.KINDS and uses_batch_statistics(module)


def is_sequential(module: nn.Module) -> bool:
    """Whether a module does nothing but call its children one after another."""
    # In this order: the class of TorchScript's modules has no forward to ask for.
    return not is_patched(module) and type(module).forward is nn.Sequential.forward


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody wants to see each call of the module."""
    return any(getattr(module, name) for name in _HOOKS)


def modules_in(line: Line) -> list[nn.Module]:
    """Every module that is called on the line, each once."""
    called = [step.module for step in line.steps if step.module is not None]
    return list(dict.fromkeys(part for module in called for part in module.modules()))


def refuse_unfit(name: str, line: Line, along: int) -> None:
    """Raise if a module of a stretch cannot be called slice by slice, whatever its input.

    Parameters
    ----------
    along
        The dimension of its input that is cut.

    Raises
    ------
    SectionError
        Naming the module and the reason.
    """
    inside = {id(step.call.__self__) for step in line.steps if hasattr(step.call, "__self__")}
    for step in line.steps:
        parts = () if step.module is None else step.module.named_modules(prefix=step.name)
        for path, part in parts:
            reason = _unfit(part, id(part) in inside)
            if along and _is_barrier(part):
                reason = "takes statistics of all tokens"
            if reason:
                raise SectionError(f"{name} cannot run in slices: {path} {reason}")


def _unfit(part: nn.Module, own: bool) -> str:
    """Why a module does not fit; ``own``: its hooks and patches are outside of the stretch."""
    if isinstance(part, nn.SyncBatchNorm):
        return "takes its statistics from other processes"
    if not own and has_hooks(part):
        return "has hooks, which would see slices instead of the batch; remove them first"
    if not own and is_patched(part):
        return "has another forward than its class"
    norms = isinstance(part, nn.modules.batchnorm._BatchNorm) and uses_batch_statistics(part)
    if norms and type(part) not in BatchNorm.KINDS:
        return "is a batch norm with code of its own"
    drops = isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0
    if part.training and (drops or isinstance(part, nn.RReLU)):
        if own:
            return "is all of the section, and draws random numbers; name what is around it too"
        if not draws_for_all(part):
            return "draws random numbers, and slices would draw others than the batch"
    return ""


def split(line: Line, positions: dict[Tensor, int]) -> list[Stage]:
    """Cut a line into stages: each BatchNorm that takes statistics of the batch begins one.

    Parameters
    ----------
    positions
        Of the trainable parameters of the stretch, as its modules hold them.
    """
    starts = [-1, *(at for at, step in enumerate(line.steps) if _begins_stage(step))]
    ends = [*starts[1:], len(line.steps)]
    stages: list[Stage] = []
    needed = frozenset({line.result})
    for start, end in reversed(list(zip(starts, ends, strict=True))):
        stages.append(_stage(line, start, end, needed, positions))
        made = {step.makes for step in line.steps[start + 1 : end]}
        stage = stages[-1]
        needed = (needed | {*stage.takes, stage.given}) - made
        if stage.norm is not None:
            needed -= {stage.enters}
    return stages[::-1]


def _begins_stage(step: Step) -> bool:
    return step.module is not None and _is_barrier(step.module)


def _stage(
    line: Line, start: int, end: int, needed: frozenset[int], positions: dict[Tensor, int]
) -> Stage:
    """Steps from ``start`` (a norm, -1 at the beginning of the line) to ``end``."""
    steps = line.steps[start + 1 : end]
    norm, given, enters = None, 0, 0
    if start >= 0:
        first = line.steps[start]
        norm, (given,), enters = BatchNorm(first.module, positions), first.reads, first.makes
    made = dict.fromkeys(step.makes for step in steps)
    read = dict.fromkeys(value for step in steps for value in step.reads)
    last = {value: at for at, step in enumerate(steps) for value in (step.makes, *step.reads)}
    drops: list[list[int]] = [[] for _ in steps]
    for value, at in last.items():
        if value not in made or value not in needed:
            drops[at].append(value)
    used = dict.fromkeys(
        positions[parameter]
        for step in steps
        if step.module is not None
        for parameter in step.module.parameters()
        if parameter in positions
    )
    takes = tuple(value for value in read if value not in made and value != enters)
    by_modules = {value for step in steps if step.module is not None for value in step.reads}
    return Stage(
        norm, given, enters, takes, frozenset(by_modules.intersection(takes)),
        tuple(value for value in made if value in needed),
        needed, steps, tuple(map(tuple, drops)), tuple(used),
    )  # fmt: skip


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
