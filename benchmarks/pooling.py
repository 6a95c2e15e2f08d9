"""What the verb ``kernels`` asks of max pooling that is compiled: torch's way, and belady's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch

from benchmarks.cases import Record
from benchmarks.questions import Asked, timed

_BACKWARD = torch.ops.aten.max_pool2d_with_indices_backward.default
# Of ResNet, VGG and an inception block: channels, what of an edge is there, and the window.
_SHAPES: tuple[tuple[int, int, tuple[Any, ...]], ...] = (
    (64, 2, ([3, 3], [2, 2], [1, 1], [1, 1], False)),
    (64, 2, ([2, 2], [2, 2], [0, 0], [1, 1], False)),
    (480, 16, ([3, 3], [1, 1], [1, 1], [1, 1], False)),
)


def pooling(asked: Asked) -> Iterator[Record]:
    """Seconds of pooling in bfloat16, and of its gradient with that of the ReLU before it.

    None without CUDA.
    """
    if asked.device.type != "cuda":
        return
    # Not at the top, as it loads the compiler: more than half of the start of every other verb.
    from belady.graph.pools import MAX_POOL

    import_module("belady.graph.windows")  # tells Inductor how
    for channels, part, numbers in _SHAPES:
        edge = asked.edge // part
        for last in (True, False):
            x = torch.randn(asked.images, channels, edge, edge, device=asked.device)
            x = x.bfloat16().relu_()
            if last:
                x = x.to(memory_format=torch.channels_last)
            for way, forward, backward in (
                ("Inductor", torch.ops.prims._low_memory_max_pool_with_offsets, _inductors),
                ("in windows", MAX_POOL, _in_windows),
            ):
                seconds = _seconds(asked, x, numbers, forward, backward)
                shape = f"{tuple(x.shape)}, window {numbers[0][0]}, stride {numbers[1][0]}"
                record = {"what": "pooling", "way": way, "op": shape, "channels_last": last}
                yield {**record, "s": seconds[0], "backward_s": seconds[1]}


def table(found: list[Record]) -> str:
    """A row for each shape and layout."""
    rows = [
        "| max pooling, bfloat16 | Inductor's, ms | in windows, ms | as fast |",
        "|---" * 4 + "|",
    ]
    ours = {_of(record): record for record in found if record["way"] == "in windows"}
    for theirs in found:
        if theirs["way"] != "Inductor":
            continue
        for name, key in (("", "s"), (", gradient", "backward_s")):
            a, b = theirs[key], ours[_of(theirs)][key]
            layout = ", channels_last" if theirs["channels_last"] else ""
            what = f"{theirs['op']}{layout}{name}"
            rows.append(f"| {what} | {a * 1e3:.2f} | {b * 1e3:.2f} | {a / b:.1f} times |")
    return "\n".join(rows) + "\n"


def _of(record: Record) -> tuple[object, object]:
    return record["op"], record["channels_last"]


def _inductors(grad: torch.Tensor, x: torch.Tensor, where: torch.Tensor, *numbers: Any) -> Any:
    # As Inductor crosses from forward to backward where it compiles both.
    kernel, stride, padding, dilation, _ = numbers
    prims, size = torch.ops.prims, x.shape[-2:]
    whole = prims._low_memory_max_pool_offsets_to_indices(
        where, kernel, size, stride, padding, dilation
    )
    return _BACKWARD(grad, x, *numbers, whole)


def _in_windows(grad: torch.Tensor, x: torch.Tensor, where: torch.Tensor, *numbers: Any) -> Any:
    from belady.graph.pools import MAX_POOL_BACKWARD

    last = x.is_contiguous(memory_format=torch.channels_last)
    return MAX_POOL_BACKWARD(grad, where, *numbers, [*x.shape[-2:]], last)


def _seconds(
    asked: Asked,
    x: torch.Tensor,
    numbers: tuple[Any, ...],
    forward: Callable[..., Any],
    backward: Callable[..., Any],
) -> tuple[float, float]:
    from belady.graph.pools import MAX_POOL

    torch._dynamo.reset()
    maxima, where = MAX_POOL(x, *numbers)
    grad = torch.randn_like(maxima)
    there = torch.compile(lambda x: forward(x, *numbers), fullgraph=True)
    back = torch.compile(
        lambda grad, x, where: backward(grad, x, where, *numbers) * (x > 0), fullgraph=True
    )
    took, _ = timed(asked.device, lambda: there(x), asked.repeats)
    took_back, _ = timed(asked.device, lambda: back(grad, x, where), asked.repeats)
    return took, took_back
