"""Barriers in kernels that read what they have written."""

from __future__ import annotations

from textwrap import dedent, indent
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor.codegen.triton import TritonKernel

from belady.graph import inductor
from belady.graph.barriers import with_barriers

BARRIER = "tl.debug_barrier()"
LOAD, STORE = (
    "a = tl.load(out_ptr0 + (r + 8*x), mask, other=0.0)",
    "tl.store(out_ptr0 + (r), a, mask)",
)
OTHER = "b = tl.load(in_ptr0 + (r), mask).to(tl.float32)"
LOOP = "for r0_offset in tl.range(0, r0_numel, R0_BLOCK):"


def kernel(*statements: str) -> str:
    body = indent("\n".join(dedent(it) for it in statements), "    ")
    head = "import triton\n\n@triton_heuristics.reduction(filename=__file__)\n@triton.jit\n"
    return f"{head}def triton_red_fused_0(in_ptr0, out_ptr0, xnumel):\n{body}\n"


def loop(*statements: str) -> str:
    return "\n".join([LOOP, *(indent(it, "    ") for it in statements)])


@pytest.mark.parametrize(
    ("statements", "guarded"),
    [
        ((loop(OTHER, STORE), loop(LOAD)), (loop(OTHER, STORE), BARRIER, loop(LOAD))),
        ((loop(OTHER, STORE), "x = 1", LOAD), (loop(OTHER, STORE), "x = 1", BARRIER, LOAD)),
        (
            (loop(STORE), loop(OTHER), loop(LOAD, STORE), loop(LOAD)),
            (loop(STORE), loop(OTHER), BARRIER, loop(LOAD, STORE), BARRIER, loop(LOAD)),
        ),
        ((loop(loop(STORE), loop(LOAD)),), (loop(loop(STORE), BARRIER, loop(LOAD)),)),
        (
            ("tl.atomic_add(out_ptr0 + (x), a, sem='relaxed')", LOAD),
            ("tl.atomic_add(out_ptr0 + (x), a, sem='relaxed')", BARRIER, LOAD),
        ),
    ],
)
def test_what_was_stored_is_loaded_after_a_barrier(
    statements: tuple[str, ...], guarded: tuple[str, ...]
) -> None:
    found = with_barriers(kernel(*statements))
    assert found == kernel(*guarded)
    assert with_barriers(found) == found


@pytest.mark.parametrize(
    "statements",
    [
        (loop(OTHER), loop(OTHER, STORE)),
        (loop(LOAD, STORE),),
        (loop(STORE), loop(OTHER)),
        (loop(STORE), BARRIER, loop(LOAD)),
        ("x = f(\n    a, b\n)", STORE),
    ],
)
def test_nothing_else_has_one(statements: tuple[str, ...]) -> None:
    assert with_barriers(kernel(*statements)) == kernel(*statements)


@pytest.mark.parametrize("fails", [False, True])
def test_kernels_are_written_with_them(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    statements = (loop(STORE), loop(LOAD))
    plain, tag = TritonKernel.codegen_kernel, torch.compiler.config.cache_key_tag
    monkeypatch.setattr(TritonKernel, "codegen_kernel", lambda *_: kernel(*statements))
    bare = TritonKernel.codegen_kernel
    seen: list[Any] = []

    def compile_(traced: fx.GraphModule, _: Any) -> fx.GraphModule:
        seen.append(TritonKernel.codegen_kernel(None, "x"))  # type: ignore[arg-type]
        # Without it torch gives kernels that somebody else compiled before.
        assert torch.compiler.config.cache_key_tag != tag
        if fails:
            raise RuntimeError("no compiler")
        return traced

    monkeypatch.setattr(inductor, "compile_fx_inner", compile_)
    graph = fx.Graph()
    node = graph.call_function(torch.ops.aten.tanh.default, (graph.placeholder("x"),))
    node.meta["val"] = x = torch.ones(4)
    graph.output((node,))
    made = inductor.Inductor()
    assert (made.fuse(fx.GraphModule({}, graph), [x]) is None) is fails
    assert seen == [kernel(statements[0], BARRIER, statements[1])]
    assert TritonKernel.codegen_kernel is bare is not plain
    assert torch.compiler.config.cache_key_tag == tag
