"""Kernels in place of the memsets of what was captured.

A device is idle before and after a memset that is launched in a CUDA graph for longer than around a
kernel, and cuDNN zeroes a counter of four bytes before many a convolution's gradient
(`python -m benchmarks kernels --question memsets`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

from belady.memory.driver import LIBRARY

_MEMSET_NODE = 2
_THREADS, _BLOCKS_AT_MOST = 256, 1024
# Bytes that a thread writes at once, and the types of PTX that do: the widest that fits is taken.
_WIDTHS = {16: ("v4.b32", "{%v, %v, %v, %v}"), 4: ("b32", "%v"), 1: ("b8", "%v")}
# Each thread writes every so many-th word, from its own number on.
_PTX = """
.version 6.0
.target sm_50
.address_size 64
.visible .entry fill(.param .u64 to, .param .u64 words, .param .u32 value)
{{
  .reg .pred %over;
  .reg .b32 %v, %block, %size, %thread, %blocks;
  .reg .b64 %to, %words, %at, %step, %here;
  ld.param.u64 %to, [to];
  ld.param.u64 %words, [words];
  ld.param.u32 %v, [value];
  cvta.to.global.u64 %to, %to;
  mov.u32 %block, %ctaid.x;
  mov.u32 %size, %ntid.x;
  mov.u32 %thread, %tid.x;
  mov.u32 %blocks, %nctaid.x;
  cvt.u64.u32 %at, %thread;
  mad.wide.u32 %at, %block, %size, %at;
  mul.wide.u32 %step, %blocks, %size;
NEXT:
  setp.ge.u64 %over, %at, %words;
  @%over bra DONE;
  mul.lo.u64 %here, %at, {width};
  add.u64 %here, %to, %here;
  st.global.{type} [%here], {value};
  add.u64 %at, %at, %step;
  bra NEXT;
DONE:
  ret;
}}
"""


class _Memset(ctypes.Structure):
    """``CUDA_MEMSET_NODE_PARAMS``."""

    _fields_ = (
        ("to", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _Kernel(ctypes.Structure):
    """``CUDA_KERNEL_NODE_PARAMS``, as the driver first exported it."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
    )


class Memsets:
    """Edits graphs of the device whose context is current.

    Functions are called by the names under which the driver has exported them since they exist.

    Parameters
    ----------
    library
        The driver.

    Raises
    ------
    OSError
        If the driver takes no kernel.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._functions = {width: self._load(width) for width in _WIDTHS}

    def become_kernels(self, graph: int) -> int:
        """Put kernels in place of a graph's memsets; how many.

        Parameters
        ----------
        graph
            A ``cudaGraph_t`` that nothing was instantiated of yet.

        Raises
        ------
        OSError
            If the driver refuses something. The graph does what it did, by kernels or memsets.
        """
        count = 0
        for node in self._nodes("cuGraphGetNodes", graph):
            kind = ctypes.c_int()
            self._call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
            if kind.value == _MEMSET_NODE:
                count += self._replace(graph, node)
        return count

    def _replace(self, graph: int, node: int) -> bool:
        memset = _Memset()
        self._call("cuGraphMemsetNodeGetParams", ctypes.c_void_p(node), ctypes.byref(memset))
        if memset.height != 1:
            return False
        before = self._nodes("cuGraphNodeGetDependencies", node)
        after = self._nodes("cuGraphNodeGetDependentNodes", node)
        made = self._add(graph, memset, before)
        try:
            follows = (_handles([made] * len(after)), _handles(after), ctypes.c_size_t(len(after)))
            if after:
                self._call("cuGraphAddDependencies", ctypes.c_void_p(graph), *follows)
        except OSError:
            # Without what follows it, it would write whenever it liked.
            self._call("cuGraphDestroyNode", ctypes.c_void_p(made))
            raise
        self._call("cuGraphDestroyNode", ctypes.c_void_p(node))
        return True

    def _add(self, graph: int, memset: _Memset, before: Sequence[int]) -> int:
        nbytes = memset.width * memset.element
        width = next(it for it in _WIDTHS if memset.to % it == 0 and nbytes % it == 0)
        words, pattern = nbytes // width, _pattern(memset.value, memset.element)
        given = ctypes.c_uint64(memset.to), ctypes.c_uint64(words), ctypes.c_uint(pattern)
        params = (ctypes.c_void_p * len(given))(*map(ctypes.addressof, given))
        kernel = _Kernel(
            function=self._functions[width],
            grid=(max(1, min(-(-words // _THREADS), _BLOCKS_AT_MOST)), 1, 1),
            block=(_THREADS, 1, 1),
            params=ctypes.addressof(params),
        )
        made, number = ctypes.c_void_p(), ctypes.c_size_t(len(before))
        into = ctypes.byref(made), ctypes.c_void_p(graph)
        self._call("cuGraphAddKernelNode", *into, _handles(before), number, ctypes.byref(kernel))
        return made.value or 0

    def _nodes(self, name: str, of: int) -> list[int]:
        number = ctypes.c_size_t()
        self._call(name, ctypes.c_void_p(of), None, ctypes.byref(number))
        found = _handles([0] * number.value)
        if number.value:
            self._call(name, ctypes.c_void_p(of), found, ctypes.byref(number))
        return [it or 0 for it in found[: number.value]]

    def _load(self, width: int) -> ctypes.c_void_p:
        written, value = _WIDTHS[width]
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        code = _PTX.format(width=width, type=written, value=value).encode() + b"\0"
        self._call("cuModuleLoadData", ctypes.byref(module), code)
        self._call("cuModuleGetFunction", ctypes.byref(function), module, b"fill")
        return function

    def _call(self, name: str, *arguments: object) -> None:
        code = int(getattr(self._library, name)(*arguments))
        if code:
            raise OSError(f"CUDA's driver refused {name}: error {code}")


def _handles(nodes: Sequence[int]) -> Any:
    return (ctypes.c_void_p * len(nodes))(*nodes)


def _pattern(value: int, element: int) -> int:
    """Four bytes of what a memset repeats."""
    value &= (1 << 8 * element) - 1
    for nbytes in (1, 2):
        if element <= nbytes:
            value |= value << 8 * nbytes
    return value


@cache
def memsets_of(device: int) -> Memsets | None:
    """What edits graphs of a CUDA device, whose context is current; None where nothing can."""
    try:
        return Memsets(ctypes.CDLL(LIBRARY))
    except OSError:
        return None
