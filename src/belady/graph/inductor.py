"""Segments of a graph as Inductor's kernels; every name of Inductor that is used, on 2.13 and 2.11.

Loaded only where they are asked for: Inductor takes seconds to load, and a C++ compiler or Triton.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._inductor import config, memory
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch.fx.experimental.proxy_tensor import make_fx

from belady.graph import windows as windows  # tells Inductor how to pool
from belady.graph.barriers import barriers
from belady.graph.segments import GOES

# What is asked of it: nothing is laid out otherwise than it was traced (`belady.graph.channels`
# lays out the whole).
_SETTINGS = {"layout_optimization": False}
# What torch's own caches of kernels are asked by beside the graph: those of others are ordered.
_TAG = "belady, as traced, pools by windows"
# What is asked of Inductor is asked of all of it, and put back: by one thread at a time.
_ASKING = threading.Lock()
# Sums along two dimensions in one kernel, of torch 2.10 and later. Where those over rows, of so
# many columns at most, are to be parts of one value, nobody writes them to it, and nobody is told
# (pytorch/pytorch#193061).
_UNWRITTEN, _COLUMNS = "mix_order_reduction", 1 << 14
_JOINS = frozenset({torch.ops.aten.cat.default, torch.ops.aten.stack.default})

Kernel = Callable[[list[Any]], Sequence[Any]]


class Inductor:
    """Compiles segments, each that is like another once; what it cannot compile runs op by op.

    Blocks of a model repeat, and so do most segments of a plan in the next one.

    Attributes
    ----------
    notes
        What a user should know, one sentence each.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._known: dict[Hashable, Kernel | None] = {}

    def fuse(self, module: fx.GraphModule, fakes: Sequence[Any]) -> Kernel | None:
        """``module`` as fused kernels; None where there are none."""
        try:
            key = module.code, tuple(_lies(fake) for fake in fakes), _settings()
            if key not in self._known:
                self._known[key] = compiled(module, fakes)
            return self._known[key]
        except Exception as error:  # a compiler that is missing, a kernel that it cannot make
            said = str(error).strip().partition("\n")[0]
            note = f"Inductor could not compile a segment, which runs op by op: {said}"
            if note not in self.notes:
                self.notes.append(note)
            return None


def prefers_channels_last(joint: fx.GraphModule) -> bool:
    """Whether Inductor would lay out the images in a graph with channels last."""
    return bool(GraphLowering.decide_layout_opt(joint, is_inference=False))


def compiled(module: fx.GraphModule, fakes: Sequence[Any]) -> Kernel | None:
    """``module`` as fused kernels, which take their inputs in a list that they empty.

    None where its results would not lie as they were traced, each on bytes of its own.
    """
    with _ASKING, config.patch(_SETTINGS):
        mode = detect_fake_mode(fakes)
        with mode or torch.no_grad(), torch.no_grad():
            traced = make_fx(module, decomposition_table=select_decomp_table())(*fakes)
        (output,) = traced.graph.find_nodes(op="output")
        results = [node.meta["val"] for node in output.args[0]]
        (wanted,) = module.graph.find_nodes(op="output")
        if not _lie_alike(results, [node.meta["val"] for node in wanted.args[0]], fakes):
            return None
        output.meta["user_visible_output_idxs"] = list(range(len(results)))
        _say_what_goes(traced, module)
        with config.patch(_settings_of(traced.graph)), barriers(), _as_traced():
            made: Any = compile_fx_inner(traced, list(fakes))
    # Without what torch's profiler and its cache of tuned kernels are told at each call: in torch
    # 2.11 that is two fifths of what a small segment takes the host.
    kernel: Kernel = getattr(made, "current_callable", made)
    return kernel


@contextmanager
def _as_traced() -> Iterator[None]:
    """Have ops stay in the order of their graph, which the plan has chosen.

    Without what reorders them Inductor would not know how much memory is held when, and would
    allocate anew what it could write into bytes that it has freed.
    """
    reorder, estimate = memory.reorder_for_peak_memory, memory.estimate_peak_memory
    tag = torch.compiler.config.cache_key_tag
    memory.reorder_for_peak_memory = partial(reorder, methods=[])
    memory.estimate_peak_memory = partial(_estimate, estimate)
    try:
        with torch.compiler.config.patch(cache_key_tag=f"{tag}, {_TAG}"):  # type: ignore[attr-defined]
            yield
    finally:
        memory.reorder_for_peak_memory = reorder
        memory.estimate_peak_memory = estimate


def _estimate(plain: Callable[..., tuple[int, list[int]]], *args: Any) -> tuple[int, list[int]]:
    """The peak and what is held at each step, which before torch 2.13 is less by all results.

    Those never go, which it took as that they go before the first step: where a graph makes much
    that stays, as forward does, next to nothing could be written into freed bytes.
    """
    peak, held = plain(*args)
    lacking = -min(0, *held)
    return peak + lacking, [bytes_ + lacking for bytes_ in held]


def _say_what_goes(traced: fx.GraphModule, module: fx.GraphModule) -> None:
    """Name what goes with its last use so that Inductor knows: all of ``arg`` it takes to stay."""
    pairs = zip(
        traced.graph.find_nodes(op="placeholder"),
        module.graph.find_nodes(op="placeholder"),
        strict=True,
    )
    for node, named in pairs:
        if named.name.startswith(GOES):
            node._rename(named.name)
            node.target = node.name
    traced.recompile()


def _settings_of(graph: fx.Graph) -> dict[str, bool]:
    """What is asked of it for one graph."""
    joins = (node for node in graph.nodes if node.target in _JOINS)
    parts = (part.meta["val"] for node in joins for part in node.all_input_nodes)
    lost = any(part.numel() <= _COLUMNS for part in parts)
    return {f"triton.{_UNWRITTEN}": False} if lost and hasattr(config.triton, _UNWRITTEN) else {}


def _settings() -> Hashable:
    """What kernels depend on beside their graph: what torch's own cache of them is asked by."""
    matmul = torch.backends.cuda.matmul
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.get_num_threads(),
        matmul.fp32_precision,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )


def _lies(tensor: torch.Tensor) -> Hashable:
    """What a kernel depends on, of a tensor that it takes."""
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device


def _lie_alike(
    results: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> bool:
    taken = {tensor.untyped_storage()._cdata for tensor in inputs}
    own = {tensor.untyped_storage()._cdata for tensor in results}
    return (
        len(own) == len(results)
        and own.isdisjoint(taken)
        and all(
            a.stride() == b.stride() and a.dtype is b.dtype and a.storage_offset() == 0
            for a, b in zip(results, wanted, strict=True)
        )
    )
