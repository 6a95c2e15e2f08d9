"""Torch-internal names that the graph engine uses to capture; checked against torch 2.13 and 2.11.

AOTAutograd traces forward and backward into one joint graph and asks a partitioner to cut it in
two. Ours keeps the joint graph and gives AOTAutograd a cut in which one tensor without elements
crosses from forward to backward. What really crosses is attached to that tensor, so which values
these are can change from one iteration to the next without tracing again, and autograd's own
lifetimes hold: when it lets go of the graph, everything saved goes.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import OptimizedModule, remove_from_cache
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.multiprocessing.reductions import StorageWeakRef

from belady.errors import TraceError

__all__ = [
    "Compilers",
    "NotCaptured",
    "as_boxed",
    "beneath_functions",
    "calls_own_functions",
    "compile_forward",
    "compile_joint",
    "fake_value",
    "is_compiled",
    "is_forward",
    "stubs",
    "tensors_on",
]

# By default Dynamo does not notice hooks that come or go, and after eight sizes of a batch it lets
# calls run as they are, which is without a budget here. And it has torch compute what NumPy would:
# sums have other bits then, and NumPy's generator has drawn nothing.
_configured = torch._dynamo.config.patch(
    skip_nnmodule_hook_guards=False,
    recompile_limit=256,
    accumulated_recompile_limit=1024,
    trace_numpy=False,
)

# Plain PyTorch goes backward outside of the region: what forward ran in float32 inside of one, a
# product with autocast off or attention's own, is differentiated in float32.
_OUTSIDE_AUTOCAST = {"backward_pass_autocast": "off"}

# Python 3.11 compiles what is three times as deep, which takes some 3 MiB of the stack.
_DEEPEST = 5_000

_BACKWARD_TAGS = ("is_backward", "must_be_in_backward")

# What runs is what Dynamo traced, with what modes and subclasses made of it then.
beneath_functions = torch._C.DisableTorchFunction

_AUTOGRAD = torch._C.DispatchKey.Autograd
_VERSION_KEYS = {_AUTOGRAD, torch._C.DispatchKey.CompositeImplicitAutograd}

# The last is what a branch on a size that data decides ends in, where nothing may break the graph.
NotCaptured = TorchDynamoException, FailOnRecompileLimitHit, GuardOnDataDependentSymNode

Runner = Callable[[list[Any]], Any]


class Compilers(Protocol):
    """What AOTAutograd asks for one graph that Dynamo captured."""

    def partition(
        self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **more: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Cut the joint graph in two."""
        ...

    def forward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Runner:
        """Compile the forward part of a graph that was cut."""
        ...

    def backward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Runner:
        """Compile the backward part."""
        ...

    def inference(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Runner:
        """Compile a graph that nobody differentiates."""
        ...


def compile_joint(
    module: fx.GraphModule, inputs: Sequence[Any], compilers: Compilers
) -> Callable[..., Any]:
    """Trace what Dynamo captured into a joint graph and let ``compilers`` make it runnable.

    Raises
    ------
    TraceError
        If it cannot be traced, or ``compilers`` say so.
    """
    backend = aot_autograd(
        fw_compiler=compilers.forward,
        bw_compiler=compilers.backward,
        inference_compiler=compilers.inference,
        partition_fn=compilers.partition,
        decompositions={},
        keep_inference_input_mutations=True,
    )
    try:
        outside = torch._functorch.config.patch(_OUTSIDE_AUTOCAST)
        with _as_eager(), _room_for(module), outside:
            compiled: Callable[..., Any] = backend(module, inputs)
    except TorchDynamoException:
        raise  # Dynamo asks itself for something
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        raise TraceError(str(error)) from error
    return compiled


def calls_own_functions(module: fx.GraphModule) -> bool:
    """Whether what Dynamo captured calls a user's `torch.autograd.Function`."""
    graphs = (it.graph for it in module.modules() if isinstance(it, fx.GraphModule))
    targets = (node.target for graph in graphs for node in graph.nodes)
    return any("autograd_function_apply" in str(target) for target in targets)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether somebody else's `torch.compile` has compiled calls of the module."""
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def compile_forward(
    forward: Callable[..., Any], backend: Callable[..., Any], *, whole: bool = False
) -> Callable[..., Any]:
    """A forward, called with the module, captured graph by graph.

    A size that changes gets graphs of its own. With ``whole`` a call that is not captured as one
    graph raises one of `NotCaptured` before anything of it runs.
    """
    options: Any = {"backend": backend, "dynamic": False, "fullgraph": whole}
    compiled: Callable[..., Any] = _configured(torch.compile(_of_its_own(forward), **options))
    return compiled


def _of_its_own(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` with a code object that nobody else has.

    With the code Dynamo keeps what it captured of it, for good, how often it did (after eight times
    it gives up) and whether it gave up before; all that is to begin anew, and to go with the model.
    """
    function = forward
    if not isinstance(forward, FunctionType) or str(forward.__module__).startswith("torch."):
        # Dynamo puts a function of its own, one for all, around one of torch's.
        def function(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

    assert isinstance(function, FunctionType)
    code, names, name = function.__code__.replace(), function.__globals__, function.__name__
    own = FunctionType(code, names, name, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    weakref.finalize(own, remove_from_cache, code).atexit = False
    return own


@contextmanager
def _as_eager() -> Iterator[None]:
    """Trace the ops that plain PyTorch runs.

    Torch holds Python versions of some differentiable ops (dropout, cuDNN's batch norm, bilinear
    interpolation) that tracing would take instead, and whose bits are others. That of a native
    batch norm stays: it updates the running statistics in the open.
    """
    taken: list[tuple[Any, Any, Any]] = []
    try:
        for op in _python_versions():
            keys = _VERSION_KEYS & op.py_kernels.keys()
            taken += [(op, key, op.py_kernels.pop(key)) for key in keys]
            op._dispatch_cache.clear()
        yield
    finally:
        for op, key, kernel in taken:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


@contextmanager
def _room_for(module: fx.GraphModule) -> Iterator[None]:
    """Let Python compile what AOTAutograd writes of a graph with thousands of results.

    It writes one sum with a term for each, those among them that a norm over the batch writes to,
    and Python goes down such a sum term by term (torch 2.13).
    """
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, min(len(module.graph.nodes), _DEEPEST)))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def _python_versions() -> list[Any]:
    packets = (getattr(torch.ops.aten, name) for name in dir(torch.ops.aten))
    ops = (
        getattr(packet, overload)
        for packet in packets
        if isinstance(packet, torch._ops.OpOverloadPacket)
        for overload in packet.overloads()  # type: ignore[no-untyped-call]
    )
    kept = torch.ops.aten.native_batch_norm.default
    return [op for op in ops if op is not kept and _AUTOGRAD in op.py_kernels]


def as_boxed(run: Callable[[list[Any]], Any]) -> Runner:
    """Mark ``run`` as taking its arguments in a list that it may empty."""

    def boxed(args: list[Any]) -> Any:
        return run(args)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


def is_forward(node: fx.Node) -> bool:
    """Whether a node of a joint graph was traced in forward."""
    return node.meta.get("partitioner_tag") not in _BACKWARD_TAGS


def fake_value(node: fx.Node) -> Any:
    """What the node gives, as a tensor without bytes or a tree of them."""
    return node.meta.get("val")


def tensors_on(reference: StorageWeakRef) -> int:
    """How many tensors lie on the storage of a live weak reference."""
    return torch._C._storage_Use_Count(reference.cdata) - _holders_beside_tensors()


@functools.cache
def _holders_beside_tensors() -> int:
    """What Python's own view of a storage adds to the count of its holders."""
    tensor = torch.empty(1)
    reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return torch._C._storage_Use_Count(reference.cdata) - 1


def stubs(
    primals: Sequence[fx.Node],
    tangents: Sequence[fx.Node],
    forward_outputs: Sequence[Any],
    backward_outputs: Sequence[Any],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Graphs for AOTAutograd to look at: right inputs and outputs, one tensor from one to other.

    They are never run.
    """
    # Shares its bytes with an input, so that AOTAutograd does not take it for donated: a donated
    # buffer forbids retain_graph.
    inputs = [value for value in map(fake_value, primals) if isinstance(value, torch.Tensor)]
    token = inputs[0].detach()
    forward, known = fx.Graph(), dict[Any, fx.Node]()
    for node in primals:
        known[node] = forward.node_copy(node)
    crossing = _like(forward, token)
    forward.output([*(_stand_in(forward, known, node) for node in forward_outputs), crossing])
    backward, known = fx.Graph(), dict[Any, fx.Node]()
    backward.placeholder("token").meta["val"] = token
    for node in tangents:
        known[node] = backward.node_copy(node)
    backward.output([_stand_in(backward, known, node) for node in backward_outputs])
    return fx.GraphModule({}, forward), fx.GraphModule({}, backward)


def _stand_in(graph: fx.Graph, known: dict[Any, fx.Node], node: Any) -> Any:
    if not isinstance(node, fx.Node):
        return node
    if node not in known:
        known[node] = _like(graph, None)
        known[node].meta = dict(node.meta)
    return known[node]


def _like(graph: fx.Graph, value: Any) -> fx.Node:
    node = graph.call_function(torch.empty, (0,))
    node.meta["val"] = value
    return node
