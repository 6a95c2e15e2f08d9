"""Straight-line Python for a part of a graph: every name is dropped right after its last use."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Protocol

from torch import fx

from belady.graph.direct import function_of
from belady.graph.joint import Joint, Step

_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class Called:
    """A call of a step, the names of its nodes, and whether memory is scarce where it stands."""

    step: Step
    names: Mapping[fx.Node, str]
    scarce: bool = False


class Does(Enum):
    """What a statement does to values: makes them, has them managed, or neither."""

    MAKES = auto()
    HOLDS = auto()
    SHOWS = auto()


class Keeper(Protocol):
    """What is told of the values of a function as it runs."""

    def before(self, *values: Any) -> None:
        """A statement comes, which reads them."""
        ...

    def made(self, *values: Any) -> None:
        """One has made them."""
        ...

    def held(self, *values: Any) -> None:
        """They are managed from now on."""
        ...


@dataclass(frozen=True, slots=True)
class Line:
    """One statement, the names that it reads and those that it binds, and what it calls."""

    text: str
    reads: tuple[str, ...] = ()
    binds: tuple[str, ...] = ()
    called: Called | None = None
    does: Does = Does.SHOWS


@dataclass
class Code:
    """The body of a function in the making.

    Attributes
    ----------
    lines
        Its statements, in order.
    constants
        Global names of it.
    """

    lines: list[Line] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    _named: dict[int, str] = field(default_factory=dict)

    def add(
        self,
        text: str,
        reads: Iterable[str] = (),
        binds: Iterable[str] = (),
        called: Called | None = None,
        does: Does = Does.SHOWS,
    ) -> None:
        """Append a statement."""
        does = does if called is None else Does.MAKES
        self.lines.append(Line(text, tuple(reads), tuple(binds), called, does))

    def constant(self, value: Any, hint: str = "c") -> str:
        """A global name for ``value``, the same one for the same object."""
        name = self._named.get(id(value))
        if name is None:
            # The table of constants keeps the object alive, and so its id its own.
            name = self._named[id(value)] = f"_{hint}{len(self.constants)}"
            self.constants[name] = value
        return name

    def call(self, step: Step, names: Mapping[fx.Node, str]) -> str:
        """The text of a call of a step."""
        node = step.node
        args = [self._argument(arg, names) for arg in node.args]
        args += [f"{key}={self._argument(arg, names)}" for key, arg in node.kwargs.items()]
        return f"{self.constant(function_of(node.target), 'f')}({', '.join(args)})"

    def step(self, step: Step, names: Mapping[fx.Node, str], *, scarce: bool = False) -> None:
        """Append a call of a step.

        Parameters
        ----------
        names
            Of the nodes that it reads and makes.
        scarce
            Whether memory is.
        """
        call, reads = self.call(step, names), [names[it] for it in step.inputs]
        called = Called(step, {it: names[it] for it in (*step.inputs, *step.made)}, scarce)
        if step.several:
            binds = [
                f"_unused{place}" if it is None else names[it]
                for place, it in enumerate(step.outputs)
            ]
            targets = "".join(f"{name}, " for name in binds)
            self.add(f"{targets}= {call}" if binds else call, reads, binds, called)
        else:
            (made,) = (names[it] for it in step.made)
            self.add(f"{made} = {call}", reads, [made], called)

    def told(self, keeper: Keeper) -> Code:
        """The same statements, of whose values ``keeper`` is told; not of those that it returns."""
        told = Code([], dict(self.constants), dict(self._named))
        it = told.constant(keeper, "keeper")
        for line in self.lines:
            if line.text.startswith("return"):
                told.lines.append(line)
                continue
            reads = tuple(name for name in line.reads if name not in self.constants)
            told.add(f"{it}.before({', '.join(reads)})", reads)
            told.lines.append(line)
            if line.does is Does.MAKES and line.binds:
                told.add(f"{it}.made({', '.join(line.binds)})", line.binds)
            elif line.does is Does.HOLDS and reads:
                told.add(f"{it}.held({', '.join(reads)})", reads)
        return told

    def with_constants(self, instead: Callable[[Any], Any]) -> Code:
        """The same statements, with what ``instead`` gives for each constant."""
        return replace(self, constants={n: instead(it) for n, it in self.constants.items()})

    def function(self, head: str) -> Callable[..., Any]:
        """Compile ``def {head}`` with these lines; a name is dropped after its last use."""
        number = next(_NUMBERS)
        source = "\n    ".join([f"def {head}:", *self._statements()]) + "\n"
        filename = f"<belady graph {number}>"
        scope = dict(self.constants)
        exec(
            compile(source, filename, "exec"), scope
        )  # the text is made here, of names and numbers
        made: Callable[..., Any] = scope[head.partition("(")[0]]
        return made

    def _statements(self) -> list[str]:
        last: dict[str, int] = {}
        for index, line in enumerate(self.lines):
            last |= dict.fromkeys((*line.reads, *line.binds), index)
        statements = []
        for index, line in enumerate(self.lines):
            statements.append(line.text)
            names = dict.fromkeys((*line.reads, *line.binds))
            dead = [n for n in names if last[n] == index and n not in self.constants]
            if dead and not line.text.startswith("return"):
                statements.append(f"del {', '.join(dead)}")
        return statements

    def _argument(self, arg: Any, names: Mapping[fx.Node, str]) -> str:
        if isinstance(arg, fx.Node):
            return names[arg]
        if isinstance(arg, (list, tuple)):
            return f"[{', '.join(self._argument(item, names) for item in arg)}]"
        if isinstance(arg, slice):
            parts = (self._argument(it, names) for it in (arg.start, arg.stop, arg.step))
            return f"slice({', '.join(parts)})"
        plain = arg is None or type(arg) in (bool, int, str)
        if plain or (type(arg) is float and math.isfinite(arg)):
            return repr(arg)
        return self.constant(arg)


class NodeNames(dict[fx.Node, str]):
    """What nodes are called in code; constants are global names."""

    def __init__(self, joint: Joint, code: Code) -> None:
        super().__init__({n: code.constant(value) for n, value in joint.constants.items()})

    def __missing__(self, node: fx.Node) -> str:
        self[node] = name = f"v_{node.name}"
        return name
