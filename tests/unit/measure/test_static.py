from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from belady.errors import TraceError
from belady.ir.files import validate
from belady.ir.trace import Mode, Phase, Source, StorageKind, Trace
from belady.measure.held import beside, missing_state, state_bytes, with_state
from belady.measure.static import static_trace
from tests.support.models import Block, ResidualCNN
from tests.unit.measure.watching import CPU, names, observed, saves_of


def traced(module: nn.Module, *args: Any, **kwargs: Any) -> Trace:
    trace = static_trace(module, (args, kwargs), CPU)
    validate(trace)
    return trace


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0][:, -1]


class Odd(nn.Module):
    """Views, in-place ops, a buffer written in forward, complex numbers, a result unused."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6))
        self.mask = torch.ones(6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.layer(x).relu_()
        self.seen.add_(y.detach().sum(0))
        left, right = (y * self.mask).chunk(2, dim=1)
        power = torch.view_as_real(torch.fft.fft(left)).square()
        return {"power": power, "right": right.t().exp(), "seen": self.seen}


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh())
        self.first = nn.Linear(6, 6)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)
        self.head.weight = self.embed.weight
        self.head.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


CASES: dict[str, tuple[Any, Any]] = {
    "cnn": (ResidualCNN, lambda: torch.rand(4, 3, 16, 16)),
    "transformer": (lambda: Block(16, 2), lambda: torch.rand(2, 5, 16)),
    "lstm": (Recurrent, lambda: torch.rand(3, 5, 6)),
    "odd": (Odd, lambda: torch.rand(3, 6)),
    "checkpoint": (lambda: Checkpointed(reentrant=False), lambda: torch.rand(3, 6)),
    "reentrant": (lambda: Checkpointed(reentrant=True), lambda: torch.rand(3, 6)),
    "tied": (Tied, lambda: torch.tensor([[1, 2, 3]])),
}


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = CASES[request.param]
    return model(), x()


def facts(trace: Trace) -> dict[str, list[Any]]:
    """What must agree, apart so that a difference is easy to read."""
    storages = trace.storages
    saves = [(save, storages[value.storage].nbytes) for value, save in saves_of(trace)]
    ops = [(op.name, op.module, op.phase, op.mode, op.forward_op, op.random) for op in trace.ops]
    kinds = sorted((s.kind.value, s.nbytes) for s in storages if s.kind is not StorageKind.STATE)
    lives = [
        (storages[v.storage].birth, storages[v.storage].released, storages[v.storage].death)
        for v, _ in saves_of(trace)
    ]
    return {"ops": ops, "saves": saves, "storages": kinds, "lives": lives}


def both(module: nn.Module, x: Tensor) -> tuple[Trace, Trace]:
    return static_trace(module, ((x,), {}), CPU), observed(module, x)


def test_it_foresees_what_is_observed(case: tuple[nn.Module, Tensor]) -> None:
    # Of oneDNN's fused LSTM torch does not know all when it fakes it; see below.
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(enabled and not isinstance(case[0], Recurrent))
    try:
        foreseen, seen = both(*case)
    finally:
        torch._C._set_mkldnn_enabled(enabled)
    assert facts(foreseen) == facts(seen)
    assert foreseen.anchors == seen.anchors
    assert foreseen.fingerprint == seen.fingerprint


def test_it_foresees_a_fused_lstm_but_for_its_workspace() -> None:
    foreseen, seen = both(Recurrent(), torch.rand(3, 5, 6))
    forward = [
        [(op.name, op.module) for op in trace.ops if op.phase is Phase.FORWARD]
        for trace in (foreseen, seen)
    ]
    assert forward[0] == forward[1]
    saves = [
        [(save.op, save.packed, save.as_input) for _, save in saves_of(trace)]
        for trace in (foreseen, seen)
    ]
    assert saves[0] == saves[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_foresees_autocast(dtype: torch.dtype) -> None:
    module, x = Block(16, 2), torch.rand(2, 5, 16)
    with torch.autocast("cpu", dtype):
        foreseen = static_trace(module, ((x,), {}), CPU)
        seen = observed(module, x)
    assert facts(foreseen) == facts(seen)
    assert str(dtype).removeprefix("torch.") in {save.dtype for _, save in saves_of(foreseen)}


def state(module: nn.Module, x: Tensor) -> dict[str, Any]:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers()), "input": x}
    seen: dict[str, Any] = {
        "torch": torch.get_rng_state().tolist(),
        "numpy": repr(np.random.get_state()),  # noqa: NPY002
        "python": random.getstate(),
        "dicts": [sorted(vars(part)) for part in module.modules()],
        "cached": torch.is_autocast_cache_enabled(),
    }
    for name, tensor in tensors.items():
        gradient = None if tensor.grad is None else tensor.grad.tolist()
        seen[name] = (id(tensor), tensor.tolist(), tensor._version, gradient)
    return seen


def test_it_touches_nothing(case: tuple[nn.Module, Tensor]) -> None:
    module, x = case
    out = module(x)
    (out["power"] if isinstance(out, dict) else out).sum().backward()
    before = state(module, x)
    hooks = [len(part._forward_hooks) for part in module.modules()]
    traced(module, x)
    assert state(module, x) == before
    assert hooks == [len(part._forward_hooks) for part in module.modules()]
    # And the real call goes as if nothing had been.
    module(x)


class Careless(nn.Module):
    """Changes itself whenever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0
        self.latest: Tensor | None = None
        self.cache: dict[str, list[Tensor]] = {"all": []}
        self.sizes = {1}
        self.noise = torch.zeros(4)

    def forward(self, x: Tensor, memory: Any = None) -> Tensor:
        self.calls += 1
        self.count = self.count + 1
        self.noise += random.random() + np.random.random() + torch.rand(())  # noqa: NPY002
        torch.manual_seed(5)
        y = self.layer(x)
        self.latest = y
        self.cache["all"].append(y)
        self.cache[f"call {self.calls}"] = [y]
        self.sizes.add(self.calls + 10)
        self.extra = nn.Linear(2, 2)
        if memory is not None:
            memory.kept.append(y)
            memory.last = y
        return y + self.noise


class Memory:
    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.last: Tensor | None = None


def test_it_puts_back_what_a_careless_module_changes() -> None:
    module, memory, x = Careless(), Memory(), torch.ones(2, 4)
    before = state(module, x)
    noise, count = module.noise, module.count
    traced(module, x, memory)
    assert state(module, x) == before
    assert (module.calls, module.latest, module.sizes) == (0, None, {1})
    assert module.cache == {"all": []}
    assert module.noise is noise
    assert module.count is count
    assert noise.tolist() == [0.0] * 4
    assert not hasattr(module, "extra")
    assert list(module._modules) == ["layer"]
    assert (memory.kept, memory.last) == ([], None)
    assert type(module(x, memory)) is Tensor


def test_it_puts_back_even_when_the_call_fails() -> None:
    class Failing(Careless):
        def forward(self, x: Tensor, memory: Any = None) -> Tensor:
            raise KeyError(super().forward(x, memory).shape)

    module, x = Failing(), torch.ones(2, 4)
    before = state(module, x)
    with pytest.raises(TraceError, match="Failing cannot be traced without running it"):
        traced(module, x)
    assert state(module, x) == before
    assert module.cache == {"all": []}


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y * 2 if y.sum() > 0 else y


def test_code_that_depends_on_data_is_refused_with_its_cause() -> None:
    with pytest.raises(TraceError, match="DataDependent cannot be traced") as refused:
        traced(DataDependent(), torch.ones(2, 4))
    assert refused.value.__cause__ is not None
    assert "DataDependent" in type(refused.value.__cause__).__name__


def test_an_error_of_the_module_is_the_cause() -> None:
    with pytest.raises(TraceError) as refused:
        traced(nn.Linear(4, 4), torch.ones(2, 5))
    assert isinstance(refused.value.__cause__, RuntimeError)


def test_real_tensors_out_of_reach_are_refused_not_written() -> None:
    hidden = [torch.zeros(4, requires_grad=True)]

    class Hiding(DataDependent):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * hidden[0]

    with pytest.raises(TraceError):
        traced(Hiding(), torch.ones(2, 4))
    assert hidden[0].grad is None


def test_it_is_a_trace_of_no_time() -> None:
    trace = traced(ResidualCNN(), torch.rand(2, 3, 16, 16))
    assert trace.source is Source.STATIC
    assert all(op.device_seconds == op.host_seconds == 0 for op in trace.ops)
    again = traced(ResidualCNN(), torch.rand(2, 3, 16, 16))
    assert again == trace


def test_optimizer_state_is_assumed() -> None:
    module, x = nn.Linear(4, 4), torch.ones(2, 4)
    module.bias.requires_grad_(False)
    for copies in (0, 1, 2):
        trace = with_state(static_trace(module, ((x,), {}), CPU), copies)
        sizes = [s.nbytes for s in trace.storages if s.kind is StorageKind.STATE]
        assert sizes == [64] * copies
        end = len(trace.ops)
        assert all((s.birth, s.death) == (0, end) for s in trace.storages if s.nbytes == 0)


def test_what_is_held_already_is_state_and_not_assumed_again() -> None:
    module, x = nn.Linear(4, 4), torch.ones(2, 4)
    trace = traced(module, x)
    shown = sum(it.nbytes for it in (*module.parameters(), x))
    assert beside(trace, shown) == trace
    held = beside(trace, shown + 100)
    state = [it for it in held.storages if it.kind is StorageKind.STATE]
    assert [it.nbytes for it in state] == [100]
    assert (state[0].birth, state[0].death) == (0, len(trace.ops))
    # The weights' copy is there, of 80 bytes, and not all of the second.
    assert [missing_state(held, copies) for copies in (0, 1, 2)] == [0, 0, 60]
    whole = with_state(held, 2)
    assert state_bytes(whole) == 160


def test_a_table_that_is_an_attribute_is_not_state() -> None:
    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.ones(8, 4)
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x * self.table)

    module, x = Turning(), torch.ones(8, 4)
    trace = traced(module, x)
    shown = sum(it.nbytes for it in (*module.parameters(), module.table, x))
    assert beside(trace, shown) == trace
    assert state_bytes(beside(trace, shown + 8)) == 8


def test_without_gradients_there_is_no_backward() -> None:
    module = nn.Linear(4, 4).requires_grad_(False)
    trace = traced(module, torch.ones(2, 4))
    assert {op.phase for op in trace.ops} == {Phase.FORWARD}
    assert saves_of(trace) == []


class Result:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.note = "unregistered"


class Wrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, *, x: Tensor) -> Result:
        return Result(self.layer(x))


def test_results_in_objects_have_a_backward() -> None:
    trace = traced(Wrapping(), x=torch.ones(2, 4))
    assert any(op.phase is Phase.BACKWARD for op in trace.ops)
    assert [s.kind for s in trace.storages].count(StorageKind.INPUT) == 1


def test_a_replay_is_marked() -> None:
    trace = traced(Checkpointed(reentrant=False), torch.rand(3, 6))
    assert any(op.mode is Mode.REPLAY for op in trace.ops)


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.backends = 0
        self.function = torch.compile(lambda y: y.sin() * y, backend=self.compile, fullgraph=True)

    def compile(self, graph: Any, _inputs: Any) -> Any:
        self.backends += 1
        return graph

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_nothing_is_compiled_for_it() -> None:
    module = Compiled()
    trace = traced(module, torch.ones(2, 4))
    assert "sin.default" in names(trace)
    assert module.backends == 0
    module(torch.ones(2, 4))
    assert module.backends == 1


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens).tanh()


def test_sparse_gradients_are_foreseen() -> None:
    trace = traced(Sparse(), torch.tensor([1, 2]))
    assert "tanh_backward.default" in names(trace)


@pytest.fixture(autouse=True)
def _no_autocast_left() -> Iterator[None]:
    yield
    assert not torch.is_autocast_enabled("cpu")


def test_modes_are_as_before() -> None:
    stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack
    with torch.no_grad():
        assert not torch.is_grad_enabled()
    traced(nn.Linear(4, 4), torch.ones(2, 4))
    assert stack() == []
    assert torch.is_grad_enabled()
    assert F.relu(torch.ones(1)).item() == 1
