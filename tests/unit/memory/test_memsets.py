"""Kernels stand in a graph where memsets stood, with the same neighbours."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from belady.memory.driver import LIBRARY
from belady.memory.launches import Launches
from belady.memory.memsets import Memsets

KERNEL, MEMSET = 0, 2
DEVICE = torch.device("cuda", 0)


class Graph:
    """A driver with one graph: kinds of nodes, what each follows, and bytes that are set.

    Parameters
    ----------
    memsets
        For each, where, the value, bytes of an element, and how many.
    refuses
        Names of calls that fail.
    """

    def __init__(self, *memsets: tuple[int, int, int, int], refuses: Sequence[str] = ()) -> None:
        self.kinds = {1: KERNEL}
        self.edges: set[tuple[int, int]] = set()
        self.sets: dict[int, tuple[int, ...]] = {}
        self.refuses, self._modules = refuses, list[bytes]()
        for it in memsets:
            last = max(self.kinds)
            self.kinds |= {last + 1: MEMSET, last + 2: KERNEL}
            self.edges |= {(last, last + 1), (last + 1, last + 2)}
            self.sets[last + 1] = it

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name in self.refuses:
                return 1
            getattr(self, f"_{name}")(*arguments)
            return 0

        return call

    def _cuModuleLoadData(self, into: Any, code: bytes) -> None:
        self._modules.append(code)
        into._obj.value = len(self._modules)

    def _cuModuleGetFunction(self, into: Any, module: Any, name: bytes) -> None:
        assert b".entry " + name in self._modules[module.value - 1]
        into._obj.value = module.value

    def _list(self, found: Sequence[int], into: Any, number: Any) -> None:
        if into is None:
            number._obj.value = len(found)
        else:
            into[: len(found)] = found

    def _cuGraphGetNodes(self, _graph: Any, into: Any, number: Any) -> None:
        self._list([*self.kinds], into, number)

    def _cuGraphNodeGetDependencies(self, node: Any, into: Any, number: Any) -> None:
        self._list(sorted(a for a, b in self.edges if b == node.value), into, number)

    def _cuGraphNodeGetDependentNodes(self, node: Any, into: Any, number: Any) -> None:
        self._list(sorted(b for a, b in self.edges if a == node.value), into, number)

    def _cuGraphNodeGetType(self, node: Any, into: Any) -> None:
        into._obj.value = self.kinds[node.value]

    def _cuGraphMemsetNodeGetParams(self, node: Any, into: Any) -> None:
        it = into._obj
        it.to, it.value, it.element, it.width = self.sets[node.value]
        it.height = 1

    def _cuGraphAddKernelNode(
        self, into: Any, _graph: Any, before: Any, number: Any, kernel: Any
    ) -> None:
        node = into._obj.value = max(self.kinds) + 1
        self.kinds[node] = KERNEL
        self.edges |= {(it, node) for it in before[: number.value]}
        params = (ctypes.c_void_p * 3).from_address(kernel._obj.params)
        to, words = (ctypes.c_uint64.from_address(it).value for it in params[:2])
        value = ctypes.c_uint.from_address(params[2]).value
        self.sets[node] = to, words, value, kernel._obj.function

    def _cuGraphAddDependencies(self, _graph: Any, a: Any, b: Any, number: Any) -> None:
        self.edges |= set(zip(a[: number.value], b[: number.value], strict=True))

    def _cuGraphDestroyNode(self, node: Any) -> None:
        del self.kinds[node.value]
        self.edges = {it for it in self.edges if node.value not in it}


def test_a_kernel_has_the_neighbours_of_the_memset() -> None:
    graph = Graph((4096, 0, 1, 4), (4096, 0x1FF, 1, 64), (4098, 0x1234, 2, 3), (4096, 7, 4, 3))
    assert Memsets(graph).become_kernels(1) == 4
    assert MEMSET not in graph.kinds.values()
    made = [node for node in graph.kinds if node > 9]
    assert graph.edges == {
        edge
        for place, node in enumerate(made)
        for edge in ((1 + 2 * place, node), (node, 3 + 2 * place))
    }
    words, bytes_, wide = 2, 3, 1
    assert [graph.sets[node] for node in made] == [
        (4096, 1, 0, words),
        (4096, 4, 0xFFFFFFFF, wide),
        (4098, 6, 0x12341234, bytes_),
        (4096, 3, 7, words),
    ]


@pytest.mark.parametrize(
    "refused", ["cuGraphAddKernelNode", "cuGraphAddDependencies", "cuGraphNodeGetDependencies"]
)
def test_a_graph_whose_memsets_stay_is_as_it_was(refused: str) -> None:
    graph = Graph((4096, 0, 1, 4), refuses=[refused])
    before = dict(graph.kinds), set(graph.edges)
    with pytest.raises(OSError, match=refused):
        Memsets(graph).become_kernels(1)
    assert (graph.kinds, graph.edges) == before


def test_a_driver_that_takes_no_kernel_is_told_at_once() -> None:
    with pytest.raises(OSError, match="cuModuleLoadData"):
        Memsets(Graph(refuses=["cuModuleLoadData"]))


@pytest.mark.gpu
def test_memsets_of_every_kind_write_what_they_did() -> None:
    driver, launches = ctypes.CDLL(LIBRARY), Launches(DEVICE)
    given = torch.full((1 << 20,), 9, dtype=torch.uint8, device=DEVICE)
    expected = given.clone().cpu()
    # The call, where, the value, how many elements, and what that is in bytes.
    asked = [
        ("cuMemsetD8Async", 0, 0, 4, [0] * 4),
        ("cuMemsetD8Async", 17, 200, 5, [200] * 5),
        ("cuMemsetD16Async", 102, 0x0102, 3, [2, 1] * 3),
        ("cuMemsetD32Async", 256, 0x01020304, 3, [4, 3, 2, 1] * 3),
        ("cuMemsetD8Async", 1024, 3, 1 << 19, [3] * (1 << 19)),
        ("cuMemsetD8Async", 600000, 5, 100001, [5] * 100001),
    ]
    for _, at, _, _, bytes_ in asked:
        expected[at : at + len(bytes_)] = torch.tensor(bytes_, dtype=torch.uint8)

    def issue() -> torch.Tensor:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        made = given + 0
        for name, at, value, number, _ in asked:
            kind = ctypes.c_ubyte if "D8" in name else ctypes.c_uint
            kind = ctypes.c_ushort if "D16" in name else kind
            to = ctypes.c_uint64(made.data_ptr() + at)
            assert not getattr(driver, name)(to, kind(value), ctypes.c_size_t(number), stream)
        return made.clone()

    edited: list[int] = []
    assert launches._memsets is not None
    become = launches._memsets.become_kernels

    class Noting:
        def become_kernels(self, graph: int) -> int:
            edited.append(become(graph))
            return edited[-1]

    launches._memsets = Noting()  # type: ignore[assignment]
    launch, made = launches.capture(issue)
    launches.over()
    assert edited == [len(asked)]
    for _ in range(2):
        launch()
        assert torch.equal(made.cpu(), expected)
