"""The forward of a module as a line of calls, as `torch.fx` records it."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError

from belady.errors import SectionError
from belady.forwards import plain_forward

# Tracing replaces methods of torch.nn.Module for as long as it lasts.
_ONE_AT_A_TIME = threading.Lock()
_IN_PLACE = (
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior",
    "ixor", "ilshift", "irshift",
)  # fmt: skip
# Of a tensor. What other attributes give may be views of it, which are written in place unseen.
_ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim"})


@dataclass(frozen=True, slots=True)
class Step:
    """One call on the way through a stretch.

    Attributes
    ----------
    module
        The module that is called as a whole; None for a function.
    name
        For messages.
    call
        Does it, given what it reads.
    reads, makes
        Numbers of values: 0 is what goes into the stretch.
    """

    module: nn.Module | None
    name: str
    call: Callable[..., Any]
    reads: tuple[int, ...]
    makes: int


def trace(
    module: nn.Module, apart: Callable[[nn.Module], bool], given: int, free: int
) -> tuple[list[Step], int]:
    """Calls that the forward of ``module`` makes, and the value that it gives.

    The code of the module runs once, with stand-ins for tensors: what depends on attributes is as
    they are now.

    Parameters
    ----------
    apart
        Whether a module inside is taken apart as well; others are called as a whole.
    given, free
        Number of the value that goes in, and the first one for what is made.

    Raises
    ------
    SectionError
        If its calls depend on the numbers in a tensor, or it does something between them that
        calls do not show.
    """
    title = type(module).__name__
    taken = [part for part in module.modules() if part is module or apart(part)]
    around = _Around(module)
    with _ONE_AT_A_TIME, _unchanged(taken, title):
        try:
            graph = _Tracer(apart).trace(around)
        except Exception as error:
            raise SectionError(
                f"{title} has a batch norm in the middle of its forward, which torch.fx cannot "
                f"take apart there: {error}"
            ) from error
    numbers: dict[fx.Node, int] = {}
    steps: list[Step] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            numbers[node] = given
        elif node.op == "output":
            (result,) = node.args
            if isinstance(result, fx.Node):
                return steps, numbers[result]
        elif node.op == "get_attr":
            raise SectionError(
                f"{title} has a batch norm in the middle of its forward, and uses a tensor of its "
                f"own there ({node.target}), not only its input and its children"
            )
        else:
            reads = tuple(numbers[it] for it in node.all_input_nodes)
            numbers[node] = free + len(steps)
            steps.append(_step(around, node, reads, numbers[node]))
    raise SectionError(f"{title} gives something else than one tensor")


class _Around(nn.Module):
    """Calls a module by the forward of its class, whatever stands in its place."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, x: Tensor) -> Any:
        return plain_forward(self.inner)(x)


class _Proxy(fx.Proxy):
    """A stand-in that notices what the one of torch.fx takes for something else, or misses."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node"):
            raise TraceError(f"it sets the attribute {name!r} of a tensor")
        super().__setattr__(name, value)


def _in_place(name: str) -> Callable[[_Proxy, Any], Any]:
    def method(self: _Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", getattr(operator, name), (self, other), {})

    return method


for _name in _IN_PLACE:
    setattr(_Proxy, f"__{_name}__", _in_place(_name))


class _Tracer(fx.Tracer):
    """Takes apart what is asked for, and refuses what a line of calls would not repeat."""

    def __init__(self, apart: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._apart = apart
        self._thread = threading.get_ident()
        self._modes = _modes()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not self._apart(m)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self._modes:
            raise TraceError(
                "a part of it runs in another mode of grad or autocast, or in a checkpoint"
            )
        node = super().create_node(kind, target, *args, **kwargs)
        if target is getattr and node.args[1] not in _ATTRIBUTES:
            raise TraceError(f"it reads the attribute {node.args[1]!r} of a tensor")
        return node


def _modes() -> tuple[object, ...]:
    """What is in force around ops, and does not show in calls."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_cache_enabled(),
        *((torch.is_autocast_enabled(it), torch.get_autocast_dtype(it)) for it in ("cpu", "cuda")),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
    )


def _step(root: nn.Module, node: fx.Node, reads: tuple[int, ...], makes: int) -> Step:
    target: Any = node.target
    if node.op == "call_module":
        module = root.get_submodule(target)
        call = module if node.args == tuple(node.all_input_nodes) and not node.kwargs else None
        return Step(module, type(module).__name__, call or _repeating(module, node), reads, makes)
    if node.op == "call_method":
        return Step(None, target, _repeating(_Method(target), node), reads, makes)
    return Step(None, target.__name__, _repeating(target, node), reads, makes)


@dataclass(frozen=True, slots=True)
class _Method:
    """A method by its name."""

    name: str

    def __call__(self, it: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(it, self.name)(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class _Read:
    """Stands for what a call reads, by its place among that."""

    place: int


@dataclass(frozen=True, slots=True)
class _Repeated:
    """A call with other values for what it reads; Dynamo can follow it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def __call__(self, *values: Any) -> Any:
        args = [_filled(arg, values) for arg in self.args]
        kwargs = {name: _filled(arg, values) for name, arg in self.kwargs}
        return self.function(*args, **kwargs)


def _repeating(function: Callable[..., Any], node: fx.Node) -> _Repeated:
    """The call of ``node``."""
    places = {read: place for place, read in enumerate(node.all_input_nodes)}
    kwargs = tuple((name, _emptied(arg, places)) for name, arg in node.kwargs.items())
    return _Repeated(function, tuple(_emptied(arg, places) for arg in node.args), kwargs)


def _emptied(arg: Any, places: dict[fx.Node, int]) -> Any:
    """An argument with numbers in the place of nodes."""
    if isinstance(arg, fx.Node):
        return _Read(places[arg])
    if isinstance(arg, (list, tuple)):
        items = [_emptied(item, places) for item in arg]
        return items if isinstance(arg, list) else tuple(items)
    if isinstance(arg, dict):
        return {key: _emptied(item, places) for key, item in arg.items()}
    if isinstance(arg, slice):
        return slice(*(_emptied(it, places) for it in (arg.start, arg.stop, arg.step)))
    return arg


def _filled(arg: Any, values: Sequence[Any]) -> Any:
    """The argument with values in the place of numbers."""
    if isinstance(arg, _Read):
        return values[arg.place]
    if isinstance(arg, list):
        return [_filled(item, values) for item in arg]
    if isinstance(arg, tuple):
        return tuple([_filled(item, values) for item in arg])
    if isinstance(arg, dict):
        return {key: _filled(item, values) for key, item in arg.items()}
    if isinstance(arg, slice):
        return slice(
            _filled(arg.start, values), _filled(arg.stop, values), _filled(arg.step, values)
        )
    return arg


@contextmanager
def _unchanged(modules: list[nn.Module], title: str) -> Iterator[None]:
    """Put attributes of ``modules`` back; raise if they were changed."""
    before = [dict(vars(module)) for module in modules]
    try:
        yield
    finally:
        changed = [
            name
            for module, was in zip(modules, before, strict=True)
            for name in _restored(vars(module), was)
        ]
    if changed:
        raise SectionError(
            f"{title} has a batch norm in the middle of its forward, which changes the attribute "
            f"{changed[0]!r} of the module"
        )


def _restored(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    missing = object()
    changed = [
        name
        for name in {**before, **now}
        if now.get(name, missing) is not before.get(name, missing)
    ]
    for name in changed:
        if name in before:
            now[name] = before[name]
        else:
            del now[name]
    return changed
