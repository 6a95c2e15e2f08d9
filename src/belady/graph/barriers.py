"""Barriers in Inductor's kernels that read what they have written.

A reduction over many elements is a kernel of several loops, and what one of them has stored another
may load. Triton lays out a store and a load of the same bytes by themselves, so a thread can load
what another has not stored yet (triton-lang/triton#10924). Until Inductor puts a barrier there
(pytorch/pytorch#190519, after torch 2.13), what is loaded can be what was in memory before. On an
H200 gradients of batch norms have such a kernel: where memory holds NaN, the loss of a test becomes
NaN without barriers in each of six runs, and with them in none
(`tests/parity/test_graph_inductor.py`, with and without `with_barriers`, on 2026-11-27).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._inductor.codegen.triton import TritonKernel

_BARRIER = "tl.debug_barrier()"
_LOADED = re.compile(r"\btl\.load\((\w+)")
_STORED = re.compile(r"\btl\.(?:store|atomic_\w+)\((\w+)")
# What torch's own caches of kernels are asked by beside the graph: those of others lack barriers.
_TAG = "belady, with barriers"


@contextmanager
def barriers() -> Iterator[None]:
    """Have them in all kernels that are written meanwhile."""
    plain = TritonKernel.codegen_kernel

    def codegen_kernel(kernel: TritonKernel, name: str | None = None) -> str:
        return with_barriers(plain(kernel, name))

    tag = torch.compiler.config.cache_key_tag
    TritonKernel.codegen_kernel = codegen_kernel  # type: ignore[assignment, method-assign]
    try:
        with torch.compiler.config.patch(cache_key_tag=f"{tag}, {_TAG}"):  # type: ignore[attr-defined]
            yield
    finally:
        TritonKernel.codegen_kernel = plain  # type: ignore[method-assign]


def with_barriers(source: str) -> str:
    """The source of a kernel, with a barrier before what loads what a statement before has stored.

    Statements within a loop are looked at by themselves, too: all threads of a program go round as
    often.
    """
    head, start, body = source.partition("@triton.jit\n")
    return head + start + "\n".join(_guarded(body.split("\n")))


def _guarded(lines: list[str]) -> list[str]:
    """Lines of one block, and of those in it."""
    made, stored = list[str](), set[str]()
    for statement in _statements(lines):
        text = "\n".join(statement)
        if stored.intersection(_LOADED.findall(text)):
            made.append(" " * _indent(statement[0]) + _BARRIER)
            stored.clear()
        elif text.strip() == _BARRIER:
            stored.clear()
        stored.update(_STORED.findall(text))
        inner = statement[0].lstrip().startswith(("for ", "def "))
        made += [statement[0], *_guarded(statement[1:])] if inner else statement
    return made


def _statements(lines: list[str]) -> Iterator[list[str]]:
    """Each line with those after it that are indented further."""
    start = 0
    for stop in range(1, len(lines) + 1):
        last = stop == len(lines)
        if last or (lines[stop].strip() and _indent(lines[stop]) <= _indent(lines[start])):
            yield lines[start:stop]
            start = stop


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))
