"""Makes modules run in slices until it is undone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from belady.errors import SectionError
from belady.forwards import Forward, is_patched, run_plain
from belady.ir.plan import Section
from belady.sections.call import SlicedCall
from belady.sections.dropout import Drawing
from belady.sections.given import separated
from belady.sections.slices import bounds
from belady.sections.stages import (
    Line,
    is_sequential,
    line_of,
    modules_in,
    own_line,
    refuse_unfit,
)
from belady.sections.standins import StandIns


def _always() -> bool:
    return True


def wrap(
    model: nn.Module, sections: Iterable[Section], when: Callable[[], bool] = _always
) -> Callable[[], None]:
    """Run modules of ``model`` in slices along the batch, or the tokens of each sample.

    A section of one module replaces the forward of that module; one of several replaces the
    forward of the `torch.nn.Sequential` whose consecutive children they are. Nothing else
    changes: names, parameters, ``state_dict``, hooks. Copies and pickles of the model run
    unsectioned.

    A call is cut into slices when grad is enabled and its input or a parameter needs a gradient,
    one of fewer samples (tokens) than slices into these; any other call runs as before. Hooks on
    modules inside a section would see slices, so they are refused; global module hooks do see them.

    Parameters
    ----------
    when
        Asked in every call; it runs as before where the answer is no.

    Notes
    -----
    Results differ from the unsectioned ones by the order of sums alone: a parameter's gradient is
    the sum of the slices' gradients in ascending order; a BatchNorm in training mode uses
    the statistics of the whole batch; an `torch.nn.Dropout` draws for the whole batch. Gradients of
    gradients are refused. What code of modules' own does to the batch (random numbers, sums over
    samples) is not seen here: ask
    `belady.sections.allowed.reasons` first, and `belady.sections.trial.trial`.

    Returns
    -------
    Callable
        Undoes it, once; graphs that exist by then can still be run backward.

    Raises
    ------
    SectionError
        If a section cannot run in slices whatever its input. A call raises it too, for what only
        a call can show.
    """
    stand_ins = StandIns()
    stretches = located(model, sections, stand_ins)
    places = [_Forward(owner, of, stand_ins, when) for owner, of in stretches.items()]
    for place in places:
        place.attach()

    def undo() -> None:
        stand_ins.restore()
        while places:
            places.pop().detach()

    return undo


@dataclass(frozen=True)
class Stretch:
    """Modules that run one after another, in slices.

    Attributes
    ----------
    children
        Names of the children of a Sequential that it consists of; empty for a module's own forward.
    along
        The dimension that is cut.
    """

    name: str
    slices: int
    along: int
    children: tuple[str, ...]
    stand_ins: StandIns

    def line(self, owner: nn.Module) -> Line:
        """What it consists of today: a child may have been replaced, an attribute changed."""
        return line_of(self._modules(owner)) if self.children else own_line(owner)

    def _modules(self, owner: nn.Module) -> list[nn.Module]:
        children = [owner._modules[child] for child in self.children]
        return [child for child in children if child is not None]

    def __call__(self, owner: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run on one tensor, and what all slices share."""
        if not torch.is_grad_enabled():
            return self.unsectioned(owner, *args, **kwargs)
        line = self.line(owner)
        modules = modules_in(line)
        parameters = trains(modules)
        whole, shared = separated(self.name, args, kwargs, self.along)
        count = whole.shape[self.along]
        # The last batch of an epoch is smaller, but whole it can need more than a slice of others.
        slices = min(self.slices, count)
        if slices < 2 or not (whole.requires_grad or parameters):
            return self.unsectioned(owner, *args, **kwargs)
        refuse_unfit(self.name, line, self.along)
        line = shared.onto(self.name, line)
        del args, kwargs
        cut = bounds(count, slices)
        drawing = Drawing(self.name, cut, self.along)
        with self.stand_ins.standing(modules, drawing.forwards(modules)) as aliases:
            return SlicedCall(self.name, line, cut, aliases, drawing, self.along).run(whole)

    def unsectioned(self, owner: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run as the modules would without sections."""
        if not self.children:
            return run_plain(owner, *args, **kwargs)
        (tensor,) = args
        for module in self._modules(owner):
            tensor = module(tensor)
        return tensor


class _Forward(Forward):
    """What a module with sections does in the place of its forward."""

    def __init__(
        self,
        owner: nn.Module,
        stretches: Sequence[Stretch],
        stand_ins: StandIns,
        when: Callable[[], bool],
    ) -> None:
        super().__init__(owner)
        self._when = when
        self._stretches = {stretch.children[:1]: stretch for stretch in stretches}
        self._stand_ins = stand_ins
        self._stands = True

    def detach(self) -> None:
        """Give the place back, also for a call that has looked this up already."""
        self._stands = False
        super().detach()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        owner = self.alive()
        found = self if self._stands else vars(owner).get("forward")
        if found is not self and isinstance(found, Forward):
            return found(*args, **kwargs)
        if not (self._stands and self._when()):
            return run_plain(owner, *args, **kwargs)
        with self._stand_ins.lock:
            whole = self._stretches.get(())
            if whole is not None:
                return whole(owner, *args, **kwargs)
            return self._chain(owner, *args, **kwargs)

    def _chain(self, owner: nn.Module, input: Any) -> Any:
        """What the forward of a Sequential does, its stretches in slices."""
        left = 0
        for name, child in owner._modules.items():
            stretch = self._stretches.get((name,))
            if stretch is not None:
                input, left = stretch(owner, input), len(stretch.children)
            elif not left and child is not None:
                input = child(input)
            left = max(0, left - 1)
        return input


def located(
    model: nn.Module, sections: Iterable[Section], stand_ins: StandIns
) -> dict[nn.Module, list[Stretch]]:
    """Find the stretches of sections by the module whose forward does them.

    Raises
    ------
    SectionError
        See `wrap`.
    """
    stretches: dict[nn.Module, list[Stretch]] = {}
    taken: set[str] = set()
    for section in sections:
        owner, stretch = locate(model, section, stand_ins)
        for name in section.modules:
            _refuse_overlap(name, taken)
        taken.update(section.modules)
        stretches.setdefault(owner, []).append(stretch)
    return stretches


def locate(model: nn.Module, section: Section, stand_ins: StandIns) -> tuple[nn.Module, Stretch]:
    """Find the stretch of a section, and the module whose forward does it.

    Raises
    ------
    SectionError
        See `wrap`.
    """
    title = "…".join(dict.fromkeys((section.modules or ("",))[i] for i in (0, -1))) or "the model"
    if section.slices < 2 or not section.modules or section.along not in (0, 1):
        raise SectionError(
            f"{title}: a section has modules, and at least two slices of them along dimension 0 or "
            "1"
        )
    if len(section.modules) == 1:
        owner = _module(model, section.modules[0])
        _refuse_patched(owner)
        stretch = Stretch(title, section.slices, section.along, (), stand_ins)
    else:
        parents = {name.rpartition(".")[0] for name in section.modules}
        owner = _module(model, min(parents))
        children = tuple(name.rpartition(".")[2] for name in section.modules)
        names = list(owner._modules)
        at = names.index(children[0]) if children[0] in names else len(names)
        if len(parents) != 1 or tuple(names[at : at + len(children)]) != children:
            raise SectionError(f"{title}: these are not consecutive modules of one parent")
        _refuse_patched(owner)
        if not is_sequential(owner):
            raise SectionError(
                f"{title}: only a torch.nn.Sequential is known to run modules one after another, "
                f"and these belong to {type(owner).__name__}; name that, or one of them"
            )
        stretch = Stretch(title, section.slices, section.along, children, stand_ins)
    refuse_unfit(title, stretch.line(owner), section.along)
    return owner, stretch


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise SectionError(f"the model has no module {name!r}") from error


def _refuse_patched(owner: nn.Module) -> None:
    if is_patched(owner):
        raise SectionError(
            f"{type(owner).__name__} has another forward than its class, perhaps from sections "
            "that are not undone; undo those first"
        )


def _refuse_overlap(name: str, taken: Iterable[str]) -> None:
    for other in taken:
        inner, outer = sorted((name, other), key=len, reverse=True)
        if not outer or f"{inner}.".startswith(f"{outer}."):
            raise SectionError(f"sections overlap: {other!r} and {name!r}")


def trains(modules: Iterable[nn.Module]) -> bool:
    """Whether one of ``modules`` (themselves, not their children) has a trainable parameter."""
    return any(
        parameter.requires_grad
        for module in modules
        for parameter in module._parameters.values()
        if parameter is not None
    )
