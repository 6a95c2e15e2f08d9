"""Names of the modules that run a graph's ops: paths of `named_modules`, for each call."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from belady.graph.captured import Captured, Named
from belady.graph.joint import Joint, Step

# An attribute of what a frame has as a local: `L['self'].b`, `L['args'][0].b`.
_ATTRIBUTE = re.compile(r"L\['\w+'\](?:\[0\])?\.(.+)")


class Paths:
    """The paths of modules and tensors in some roots, as they are now."""

    def __init__(self, roots: Iterable[torch.nn.Module]) -> None:
        self._roots = list(roots)
        self._known: dict[str, tuple[dict[int, str], dict[int, str]]] = {}

    def of(self, graph: Captured, joint: Joint, args: Sequence[Any]) -> Mapping[fx.Node, str]:
        """The module that runs each step of forward in a call of ``graph`` with ``args``.

        One graph serves all modules of a class, which differ in the parameters that they give it.
        """
        modules, tensors = self._below(graph.name)
        inputs = tuple(tensors.get(id(arg)) for arg in args)
        if graph.named is None:
            graph.named = Named(_steps(joint, modules, inputs), inputs)
        moved = _moved(graph.named.inputs, inputs)
        return {node: _renamed(path, moved) for node, path in graph.named.steps.items()}

    def _below(self, calling: str) -> tuple[dict[int, str], dict[int, str]]:
        """Paths by identity; what several roots have is called as in the one that is called."""
        if calling not in self._known:
            modules: dict[int, str] = {}
            tensors: dict[int, str] = {}
            for root in sorted(self._roots, key=lambda it: type(it).__name__ != calling):
                for path, module in root.named_modules():
                    modules.setdefault(id(module), path or type(root).__name__)
                for path, tensor in (*root.named_parameters(), *root.named_buffers()):
                    tensors.setdefault(id(tensor), path)
            self._known[calling] = modules, tensors
        return self._known[calling]


def _steps(
    joint: Joint, modules: Mapping[int, str], inputs: Sequence[str | None]
) -> dict[fx.Node, str]:
    stacks = {step.node: _stack(step) for step in joint.forward}
    own = _of_frame(stacks.values(), modules, inputs)
    found = {}
    for node, stack in stacks.items():
        if stack:
            number, _, kind = stack[-1]
            found[node] = modules.get(number, f"<{kind}>")
        else:
            found[node] = own
    return found


def _stack(step: Step) -> list[tuple[int, str, str]]:
    """Identity, Dynamo's name and class of the modules that call one another, innermost last."""
    stack = step.node.meta.get("nn_module_stack") or {}
    found = []
    for key, (source, kind) in stack.items():
        number = str(key).partition("@")[0]
        found.append((int(number) if number.isdigit() else 0, str(source), kind.__name__))
    return found


def _of_frame(
    stacks: Iterable[list[tuple[int, str, str]]],
    modules: Mapping[int, str],
    inputs: Sequence[str | None],
) -> str:
    """The module whose forward is the frame that was captured: a root, or what a break led to."""
    for stack in filter(None, stacks):
        number, source, _ = stack[0]
        attribute = _ATTRIBUTE.fullmatch(source)
        path = modules.get(number, "")
        if attribute is not None and f".{path}".endswith(f".{attribute[1]}"):
            return path.removesuffix(attribute[1]).removesuffix(".")
    owners = {path.rpartition(".")[0] for path in inputs if path is not None}
    return owners.pop() if len(owners) == 1 and not any(stacks) else ""


def _moved(before: Sequence[str | None], now: Sequence[str | None]) -> dict[str, str]:
    """What leads to the same tensors of other modules: where it led first, and where it leads."""
    found = {}
    for one, other in zip(before, now, strict=True):
        if one is None or other is None or one == other:
            continue
        old, new = one.split("."), other.split(".")
        while old and new and old[-1] == new[-1]:
            del old[-1], new[-1]
        found[".".join(old)] = ".".join(new)
    return found


def _renamed(path: str, moved: Mapping[str, str]) -> str:
    for old in sorted(moved, key=len, reverse=True):
        if path == old or path.startswith(f"{old}.") or (not old and not path.startswith("<")):
            return f"{moved[old]}.{path[len(old) :].removeprefix('.')}".strip(".")
    return path
