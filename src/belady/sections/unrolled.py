"""Modules in slices inside of a captured graph: Dynamo follows the slices one after another.

The graph holds the ops of every slice then, and what a slice saves is a value like any other. There
is no node of ours: autograd goes through the slices from the last to the first, and adds up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from belady.forwards import Forward, called, run_plain
from belady.ir.plan import Section
from belady.sections.given import separated
from belady.sections.pooled import Pooled, pooled
from belady.sections.slices import bounds
from belady.sections.stages import Line, Stage, modules_in, refuse_unfit, split
from belady.sections.standins import StandIns
from belady.sections.tracing import Step
from belady.sections.unrolled_dropout import Drawn
from belady.sections.wrap import Stretch, located, trains

# Of a slice, by the number of the value.
_Parts = dict[int, Tensor]


class Unrolling:
    """Sections of one model while its calls are captured; between calls nothing shows.

    Results are those of `belady.sections.wrap.wrap`, but for the order of sums.

    Parameters
    ----------
    when
        Asked where a call is captured, which is captured whole where the answer is no.

    Attributes
    ----------
    own
        What does the forward of the model itself, if that is in slices; it is not put in its place.

    Raises
    ------
    SectionError
        If a section cannot run in slices whatever its input.
    """

    def __init__(
        self, model: nn.Module, sections: Iterable[Section], when: Callable[[], bool]
    ) -> None:
        owners = located(model, sections, StandIns())
        self._places = [Unrolled(owner, stretches, when) for owner, stretches in owners.items()]
        self.own = next((place for place in self._places if place.alive() is model), None)

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Have slices captured in the block.

        Raises
        ------
        SectionError
            If modules can no longer run in slices.
        """
        for place in self._places:
            place.refresh()
        standing: list[Forward] = [place for place in self._places if place is not self.own]
        for drawn in (drawn for place in self._places for drawn in place.dropouts):
            # A call that was interrupted has left it in the middle of something.
            drawn.leave()
            standing.append(drawn)
        with ExitStack() as stack:
            for it in standing:
                stack.callback(it.detach)
                it.attach()
            yield


@dataclass(frozen=True)
class _Run:
    """A child that is called, or modules in slices, as they are today.

    Attributes
    ----------
    paths
        Of what is called as a whole, by what it makes: where it is below the owner. Ops are named
        by the way on which Dynamo comes to their module.
    """

    child: str
    stretch: Stretch | None = None
    line: Line | None = None
    stages: tuple[Stage, ...] = ()
    trains: bool = False
    paths: tuple[tuple[str, ...] | None, ...] = ()
    dropouts: tuple[Drawn, ...] = ()

    @property
    def shown(self) -> tuple[object, ...]:
        """What a graph depends on: the rest is made of this."""
        norms = [None if stage.norm is None else stage.norm.module for stage in self.stages]
        return self.child, self.line, self.trains, norms

    def call(self, owner: nn.Module, step: Step, *values: Any) -> Any:
        """Do a step."""
        path = self.paths[step.makes]
        if path is None:
            return step.call(*values)
        module: Any = owner
        for name in path:
            module = module._modules[name]
        return module(*values) if path else run_plain(owner, *values)


class Unrolled(Forward):
    """Stands in the place of a forward, and does it in slices where it is captured.

    Elsewhere it is the plain forward: what does not become part of a graph runs whole.

    Attributes
    ----------
    runs
        What it does, one after another: for Dynamo, which captures anew what it finds changed.
    """

    def __init__(
        self, owner: nn.Module, stretches: Sequence[Stretch], when: Callable[[], bool]
    ) -> None:
        super().__init__(owner)
        self._stretches = {stretch.children[:1]: stretch for stretch in stretches}
        self._when = when
        self.runs: tuple[_Run, ...] = ()
        self.refresh()

    @property
    def dropouts(self) -> list[Drawn]:
        """What stands on dropouts meanwhile."""
        return [drawn for run in self.runs for drawn in run.dropouts]

    def refresh(self) -> None:
        """Look at the modules as they are now; to be called before each call.

        What `torch.fx` records of a forward is no code that Dynamo could guard.

        Raises
        ------
        SectionError
            If they can no longer run in slices.
        """
        runs = tuple(self._found())
        if [run.shown for run in runs] != [run.shown for run in self.runs]:
            self.runs = runs

    def lets(self) -> bool:
        """Whether a call that is being captured runs in slices."""
        return self._when()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.run(self.alive(), *args, **kwargs)

    def run(self, owner: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run it, given the module."""
        captured = torch.compiler.is_compiling() and _lets(self.token)
        if not captured or not torch.is_grad_enabled():
            return run_plain(owner, *args, **kwargs)
        if not self.runs[0].child:
            return _in_slices(self.runs[0], owner, args, kwargs)
        (value,) = (*args, *kwargs.values())
        for run in self.runs:
            if run.stretch is None:
                child: Any = owner._modules[run.child]
                value = child(value)
            else:
                value = _in_slices(run, owner, (value,), {})
        return value

    def _found(self) -> Iterator[_Run]:
        owner, left = self.alive(), 0
        if () in self._stretches:
            yield _run(owner, self._stretches[()], "")
            return
        for name, child in owner._modules.items():
            stretch = self._stretches.get((name,))
            if stretch is not None:
                left = len(stretch.children)
                yield _run(owner, stretch, name)
            elif not left and child is not None:
                yield _Run(name)
            left = max(0, left - 1)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _lets(token: str) -> bool:
    """Run while Dynamo captures, and not by what it has captured."""
    place = called(token)
    assert isinstance(place, Unrolled)
    return place.lets()


def _run(owner: nn.Module, stretch: Stretch, child: str) -> _Run:
    line = stretch.line(owner)
    refuse_unfit(stretch.name, line, stretch.along)
    modules = modules_in(line)
    places = {module: tuple(path.split(".")) for path, module in owner.named_modules() if path}
    paths: list[tuple[str, ...] | None] = [None] * (len(line.steps) + 1)
    for step in line.steps:
        if step.module is owner:
            paths[step.makes] = ()
        elif step.module is not None and step.call is step.module:
            paths[step.makes] = places[step.module]
    dropouts = tuple(Drawn(it) for it in dict.fromkeys(modules) if type(it) is nn.Dropout)
    stages = tuple(split(line, {}))
    return _Run(child, stretch, line, stages, trains(modules), tuple(paths), dropouts)


def _in_slices(run: _Run, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a stretch makes of what it is given, slice by slice."""
    stretch, line = run.stretch, run.line
    assert stretch is not None
    assert line is not None
    whole, shared = separated(stretch.name, args, kwargs)
    slices = min(stretch.slices, whole.shape[0])
    if slices < 2 or not (whole.requires_grad or run.trains):
        return stretch.unsectioned(owner, *args, **kwargs)
    cut = bounds(whole.shape[0], slices)
    given = torch.split(whole, [where.size for where in cut])
    held: list[_Parts] = [{} for _ in cut]
    for stage in run.stages:
        norm = None
        if stage.norm is not None:
            norm = pooled(stage.norm.module, [parts[stage.given] for parts in held])
        for index, parts in enumerate(held):
            for drawn in run.dropouts:
                drawn.enter(cut, index)
            found = _entered(stage, norm, given[index], parts)
            for step in stage.steps:
                call = partial(run.call, owner, step)
                values = [found[value] for value in step.reads]
                # Where more is given, there is but one step.
                found[step.makes] = call(*values) if shared.nothing else shared.call(call, *values)
            for value in (stage.enters, *stage.gives):
                parts[value] = found[value]
    for drawn in run.dropouts:
        drawn.leave()
    return torch.cat([parts[line.result] for parts in held])


def _entered(stage: Stage, norm: Pooled | None, part: Tensor, held: _Parts) -> _Parts:
    """What the steps of a slice may read; ``held`` is what it has from before."""
    found = dict(held)
    if norm is not None:
        found[stage.enters] = norm.normalised(held[stage.given])
    else:
        # Alone, so that slices can be moved one by one, and the whole input can go.
        found[stage.enters] = part.clone() if part.requires_grad else part
    for value in stage.takes:
        if value in stage.copies and (value or part.requires_grad):
            # What two stages save would come back for the first and stay for the second.
            found[value] = held[value].clone()
    return found
