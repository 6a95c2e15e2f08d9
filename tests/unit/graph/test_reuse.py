"""What Inductor is told of memory: the order of ops, what goes, and what is held when."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config, memory
from torch._inductor.graph import GraphLowering
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef

import tests.parity.graphs as graphs
from belady.graph import inductor, program
from belady.graph.segments import GOES
from tests.parity.graphs import PlannedHost, compiled
from tests.parity.racing import hostile_carrier, random_plan
from tests.support.models import CNN
from tests.support.training import Training

aten = torch.ops.aten
ROWS, WIDTH, DEPTH, BATCH = 512, 64, 4, 8


def written(function: Callable[..., Any], *inputs: Tensor, goes: Sequence[int] = ()) -> str:
    """The code that Inductor writes for a function of tensors without bytes."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    for number, node in enumerate(module.graph.find_nodes(op="placeholder")):
        if number in goes:
            node._rename(f"{GOES}{number}")
            node.target = node.name
    module.recompile()
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patched, config.patch({"compile_threads": 1}):
        patched.setattr(GraphLowering, "save_output_code", staticmethod(found.append))
        assert inductor.compiled(module, inputs) is not None
    (code,) = found
    return code[code.index("def call") : code.index("def get_args")]


@pytest.fixture
def in_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if not shutil.which("g++"):
        pytest.skip("Inductor needs a C++ compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("in_cache")
def test_freed_bytes_are_written_again() -> None:
    """As it is where Inductor may reorder: forward of norms, whose statistics go one by one."""

    def forward(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        made = list[Tensor]()
        for weight in weights:
            var, mean = aten.var_mean.correction(x, [1], correction=0, keepdim=True)
            made.append((x - mean) * aten.rsqrt.default(var))
            x = aten.mm.default(made[-1], weight)
        return (*made, x)

    with FakeTensorMode():
        x, weights = torch.empty(ROWS, WIDTH), [torch.empty(WIDTH, WIDTH) for _ in range(DEPTH)]
    code = written(forward, x, *weights)
    assert len(re.findall(rf"= empty_strided_cpu\(\({ROWS}, 1\)", code)) == 2
    assert len(re.findall(rf"= empty_strided_cpu\(\({ROWS}, {WIDTH}\)", code)) == DEPTH + 1


@pytest.mark.usefixtures("in_cache")
def test_ops_stay_where_the_plan_has_them() -> None:
    """Also where less would be held in another order."""

    def both(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        one, two = aten.mm.default(a, b), aten.mm.default(a, c)
        return one.sum(), two.sum()

    with FakeTensorMode():
        a, b, c = torch.empty(ROWS, WIDTH), torch.empty(WIDTH, ROWS), torch.empty(WIDTH, ROWS)
    before = memory.reorder_for_peak_memory, memory.estimate_peak_memory
    code = written(both, a, b, c)
    calls = re.findall(r"extern_kernels\.mm|\bcpp_fused", code)
    assert calls == ["extern_kernels.mm", "extern_kernels.mm", "cpp_fused"]
    assert before == (memory.reorder_for_peak_memory, memory.estimate_peak_memory)


def test_what_is_asked_of_inductor_is_put_back_by_threads_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second is not to take what the first asks for as how it was."""
    graph = fx.Graph()
    node = graph.call_function(aten.tanh.default, (graph.placeholder("x"),))
    node.meta["val"] = x = torch.ones(4)
    graph.output((node,))
    module = fx.GraphModule({}, graph)
    first, second, seen = threading.Event(), threading.Event(), list[Any]()

    def compile_(traced: fx.GraphModule, _: Any) -> fx.GraphModule:
        seen.append(memory.reorder_for_peak_memory)
        first.set()
        # Of two at once the first goes on when the second has come, and ends before it.
        second.wait(0.3)
        second.set()
        return traced

    monkeypatch.setattr(inductor, "compile_fx_inner", compile_)
    before = memory.reorder_for_peak_memory, memory.estimate_peak_memory
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(inductor.compiled, module, [x])
        assert first.wait(60)
        two = pool.submit(inductor.compiled, module, [x])
        assert one.result() is not None
        assert two.result() is not None
    assert before == (memory.reorder_for_peak_memory, memory.estimate_peak_memory)
    for asked in seen:
        assert asked.func is before[0]


@pytest.mark.usefixtures("in_cache")
@pytest.mark.parametrize("goes", [False, True])
def test_what_is_freed_waits_only_while_less_is_held_than_ever(goes: bool) -> None:
    """The second of two values is written where the first was, but not while as much is held.

    Which is between the two, if ``y`` goes there, and after both otherwise.
    """

    def backward(x: Tensor, y: Tensor, w: Tensor, long: Tensor, few: Tensor) -> tuple[Tensor, ...]:
        one = aten.mm.default(aten.mm.default(x, w), few)
        other = aten.mm.default(aten.mm.default(y, long), few)
        return one, other, aten.mm.default(long, aten.mm.default(w, x))

    with FakeTensorMode():
        x, w, few = (torch.empty(WIDTH, columns) for columns in (WIDTH, WIDTH, 1))
        y, long = torch.empty(2 * WIDTH, 4 * WIDTH), torch.empty(4 * WIDTH, WIDTH)
    code = written(backward, x, y, w, long, few, goes=(1,) if goes else ())
    assert (f"{GOES}1" in code) is goes
    assert len(re.findall(rf"= empty_strided_cpu\(\({WIDTH}, {WIDTH}\)", code)) == 1 + goes


@pytest.mark.parametrize("seed", range(4))
def test_what_is_said_to_go_is_gone_with_its_segment(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, stays = list[bool](), list[bool]()

    def fuse(module: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
        names = [node.name for node in module.graph.find_nodes(op="placeholder")]

        def run(given: list[Any]) -> Any:
            storages = {
                name: StorageWeakRef(it.untyped_storage())
                for name, it in zip(names, given, strict=True)
            }
            made = fx.Interpreter(module).boxed_run(given)
            alive = {it.untyped_storage()._cdata for it in made}
            for name, storage in storages.items():
                gone = storage.expired() and storage.cdata not in alive
                (said if name.startswith(GOES) else stays).append(gone)
            return made

        return run

    def programs(*given: Any) -> program.Program:
        return program.program_of(*given, fuse=fuse)

    monkeypatch.setattr(graphs, "program_of", programs)
    expected, training = Training(CNN), Training(CNN)
    carrier = hostile_carrier("threads")
    host = PlannedHost(training.models, carrier, lambda trace: random_plan(trace, "threads", seed))
    try:
        with compiled(training, host):
            torch.manual_seed(1)
            loss = training.loss(0, BATCH)
            found = torch.autograd.grad(loss, list(training.models[0].parameters()))
    finally:
        carrier.close()
    torch.manual_seed(1)
    plain = torch.autograd.grad(expected.loss(0, BATCH), list(expected.models[0].parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert said
    assert all(said)
    assert not all(stays)
