"""Hand-made networks: layers by name, chained, forked and joined.

Forward op ``i`` of ``n`` has its backward at op ``2n - 1 - i``. Every layer saves its input,
except joins (nothing) and in-place ReLU (its output). One activation is 1 MiB.
"""

from __future__ import annotations

from dataclasses import replace

from belady.ir.hardware import Allocator, HardwareProfile
from belady.ir.plan import Offload, Plan
from belady.ir.trace import Trace
from tests.support.builder import OpSpec, build_trace
from tests.support.strategies import machine

MIB = 1 << 20
ATEN = {
    "conv": "aten.convolution.default",
    "relu": "aten.relu_.default",
    "gelu": "aten.gelu.default",
    "pool": "aten.max_pool2d_with_indices.default",
    "norm": "aten.native_batch_norm.default",
    "fc": "aten.addmm.default",
    "add": "aten.add.Tensor",
    "cat": "aten.cat.default",
}
VGG = "conv relu conv relu pool conv relu fc"


def net(
    layers: str,
    *,
    every_boundary: bool = True,
    input_held: bool = True,
    device: str = "cuda",
    workspace_bytes: int = 0,
) -> Trace:
    """Network of these layers; ``name@k`` reads the output of ``k`` layers before the last one.

    With ``workspace_bytes`` every conv knows a fast algorithm that takes them and a slow one
    without.
    """
    words = [word.partition("@") for word in layers.split()]
    parsed = [(name, int(back or 0)) for name, _, back in words]
    specs = [
        OpSpec(
            nbytes=MIB,
            branch=back,
            join=name in ("add", "cat"),
            saves_input=name not in ("add", "cat"),
            saves_output=name == "relu",
            in_place=name == "relu",
            lean_algorithm=name == "conv" and workspace_bytes > 0,
            workspace_bytes=workspace_bytes if name == "conv" else 0,
        )
        for name, back in parsed
    ]
    trace = build_trace(specs, device=device, every_boundary=every_boundary, input_held=input_held)
    ops = list(trace.ops)
    for i, (name, _) in enumerate(parsed):
        ops[i] = replace(ops[i], name=ATEN[name])
        # The builder knows alternatives of forward ops alone.
        back = len(ops) - 1 - i
        slower = [replace(a, device_seconds=2 * a.device_seconds) for a in ops[i].algorithms]
        ops[back] = replace(ops[back], algorithms=tuple(slower))
    return replace(trace, ops=tuple(ops))


def gpu(*, disk: bool = False, link_rate: float = 5e10) -> HardwareProfile:
    return machine(
        "cuda", link_rate=link_rate, disk=disk, disk_rate=3e9, allocator=Allocator(1, 0.0, 0)
    )


def cpu() -> HardwareProfile:
    return machine("cpu", link_rate=1.0, disk=True, disk_rate=3e9, allocator=Allocator(1, 0.0, 0))


def written_by(trace: Trace, op: int) -> int:
    """Value that forward op ``op`` wrote."""
    return trace.ops[op].writes[0]


def moves(trace: Trace, plan: Plan) -> dict[int, tuple[int, int, int, int]]:
    """``(out, free, back, ready)`` boundaries of each offload, by the op that wrote the value."""
    found = {}
    for index, it in plan.decisions.items():
        assert isinstance(it, Offload)
        times = (it.copy_out_after + 1, it.free_at, it.copy_in_at, it.ready_by)
        found[trace.values[index].producer] = times
    return found


def quick_layers(count: int, *, convolutions: bool = True) -> Trace:
    """Two ops in turn, both quickly made again: convolutions and norms, or two that are neither."""
    op = OpSpec(nbytes=100 * 10**6, device_us=100, replayable=True)
    trace = build_trace([op, op] * count)
    names = (ATEN["conv"], ATEN["norm"])
    ops = (
        replace(it, name=names[index % 2]) if convolutions and it.replayable else it
        for index, it in enumerate(trace.ops)
    )
    return replace(trace, ops=tuple(ops))
