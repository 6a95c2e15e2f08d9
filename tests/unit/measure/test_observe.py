from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from belady.ir.trace import Mode, Phase, Source, StorageKind, Tier
from belady.measure.observe import assemble, dispatch_seconds, held_bytes
from tests.unit.measure.watching import (
    Watch,
    names,
    observed,
    op_named,
    ops_named,
    pseudo_loss,
    saves_of,
    storage_of,
)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.act = nn.ReLU()
        self.second = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))


@pytest.fixture
def x() -> Tensor:
    return torch.ones(3, 4)


def test_the_document(x: Tensor) -> None:
    trace = observed(Chain(), x)
    assert (trace.source, trace.device, trace.roots) == (Source.EAGER, "cpu", ("Chain",))
    assert trace.versions == (("torch", str(torch.__version__)),)
    boundaries = {b for _, save in saves_of(trace) for b in (save.packed, *save.reads)}
    assert trace.anchors == tuple(sorted(boundaries))


def test_ops_know_module_phase_and_the_op_they_differentiate(x: Tensor) -> None:
    trace = observed(Chain(), x)
    forward = [op for op in trace.ops if op.phase is Phase.FORWARD and op.name != "aten.t.default"]
    assert [(op.name, op.module) for op in forward] == [
        ("aten.addmm.default", "first"),
        ("aten.relu.default", "act"),
        ("aten.addmm.default", "second"),
    ]
    assert [op.phase for op in trace.ops if op.name == "aten.ones_like.default"] == [Phase.LOSS]
    relu, _ = op_named(trace, "relu.default")
    _, back = op_named(trace, "threshold_backward.default")
    assert (back.forward_op, back.module, back.phase) == (relu, "act", Phase.BACKWARD)
    first, second = ops_named(trace, "addmm.default")
    for index in ops_named(trace, "mm.default"):
        origin = trace.ops[index].forward_op
        assert trace.ops[index].module == ("second" if origin == second else "first")
        assert origin in (first, second)


def test_a_saved_value_lives_from_pack_to_drop(x: Tensor) -> None:
    trace = observed(Chain(), x)
    relu, _ = op_named(trace, "relu.default")
    back, _ = op_named(trace, "threshold_backward.default")
    value = next(v for v in trace.values if v.producer == relu)
    by_op = {save.op: save for save in value.saves}
    of_relu, of_addmm = by_op[relu], by_op[ops_named(trace, "addmm.default")[1]]
    assert not of_relu.as_input
    assert of_addmm.as_input
    assert (of_relu.packed, of_relu.module, of_relu.shape) == (relu + 1, "act", (3, 8))
    assert of_relu.reads == (back,)
    assert of_relu.dropped == back + 1
    assert of_addmm.packed == relu + 2  # after the weight has been transposed
    assert of_addmm.dropped <= of_relu.reads[0]
    storage = storage_of(trace, value)
    assert storage.kind is StorageKind.ACTIVATION
    assert (storage.birth, storage.nbytes) == (relu, 96)
    # Forward drops it once the second layer has run; the copies made for backward go on.
    assert storage.released == ops_named(trace, "addmm.default")[1] + 1
    assert storage.death == of_relu.dropped


def test_parameters_gradients_and_state_are_persistent(x: Tensor) -> None:
    model = Chain()
    optimizer = torch.optim.AdamW(model.parameters())
    watch = Watch(model)
    pseudo_loss(watch.call(model, x))
    watch.recorder.phase = Phase.OPTIMIZER
    optimizer.step()
    trace = watch.finish(optimizer)
    kinds = [storage.kind for storage in trace.storages]
    assert kinds.count(StorageKind.PARAMETER) == 4
    assert kinds.count(StorageKind.GRADIENT) == 4
    assert kinds.count(StorageKind.STATE) == 4 * 3  # two moments and a step count
    end = len(trace.ops)
    for storage in trace.storages:
        if storage.persistent:
            assert storage.home is Tier.DEVICE
            assert storage.death == end
            # What the first step makes is there from the start of a steady iteration.
            assert storage.birth == 0 or storage.kind is StorageKind.GRADIENT
    assert any(op.phase is Phase.OPTIMIZER for op in trace.ops)
    (given,) = (s for s in trace.storages if s.kind is StorageKind.INPUT)
    assert (given.birth, given.released, given.death) == (0, end, end)
    assert not given.persistent


def test_gradients_that_are_there_already_are_there_from_the_start(x: Tensor) -> None:
    model = Chain()
    pseudo_loss(model(x))
    trace = observed(model, x)
    gradients = [s for s in trace.storages if s.kind is StorageKind.GRADIENT]
    assert [(s.birth, s.death) for s in gradients] == [(0, len(trace.ops))] * 4


def test_frozen_parameters_have_no_gradient(x: Tensor) -> None:
    model = Chain()
    model.first.requires_grad_(False)
    trace = observed(model, x)
    kinds = [storage.kind for storage in trace.storages]
    assert kinds.count(StorageKind.PARAMETER) == 4
    assert kinds.count(StorageKind.GRADIENT) == 2
    assert all(save.module != "first" for _, save in saves_of(trace))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def test_tied_weights_are_one_storage() -> None:
    trace = observed(Tied(), torch.tensor([[1, 2], [3, 4]]))
    kinds = [storage.kind for storage in trace.storages]
    assert kinds.count(StorageKind.PARAMETER) == kinds.count(StorageKind.GRADIENT) == 1
    weight = kinds.index(StorageKind.PARAMETER)
    assert {i for i in trace.saved if trace.values[i].storage == weight} == set()


class Views(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        halves = (x * x).chunk(2, dim=1)
        return halves[0] * halves[1].sigmoid()


def test_views_are_saved_with_their_geometry(x: Tensor) -> None:
    trace = observed(Views(), x.requires_grad_())
    chunks = [save for _, save in saves_of(trace) if save.shape == (3, 2) and save.offset == 0]
    assert {save.stride for save in chunks} == {(4, 1), (2, 1)}
    squared = ops_named(trace, "mul.Tensor")[0]
    held = {v.storage for v, s in saves_of(trace) if s.stride == (4, 1) and s.shape == (3, 2)}
    assert held == {v.storage for v in trace.values if v.producer == squared}


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(self.layer(x)) * 2


def test_an_in_place_op_saves_the_new_version(x: Tensor) -> None:
    trace = observed(InPlace(), x)
    relu, op = op_named(trace, "relu_.default")
    assert op.mutates
    (value,) = (v for v in trace.values if v.producer == relu)
    before = [v for v in trace.values if v.storage == value.storage and v is not value]
    assert [v.version for v in (*before, value)] == [0, 1]
    assert [save.op for save in value.saves] == [relu]
    assert all(v.saves == () for v in before)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_buffers_are_persistent(x: Tensor) -> None:
    trace = observed(Norm(), x)
    kinds = [storage.kind for storage in trace.storages]
    assert kinds.count(StorageKind.BUFFER) == 3
    assert kinds.count(StorageKind.PARAMETER) == 2


def test_autocast_casts_are_activations(x: Tensor) -> None:
    model = Chain()
    watch = Watch(model)
    with torch.autocast("cpu", torch.bfloat16):
        y = watch.call(model, x)
    y.backward(torch.ones_like(y))
    trace = watch.finish()
    assert "_to_copy.default" in names(trace)
    assert {save.dtype for _, save in saves_of(trace)} == {"bfloat16"}
    casts = {v.storage for v, s in saves_of(trace) if s.shape == (4, 8)}
    assert all(trace.storages[s].kind is StorageKind.ACTIVATION for s in casts)


def test_dropout_is_random(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    trace = observed(model, x)
    drawn = {op.name for op in trace.ops if op.random}
    assert drawn <= {"aten.native_dropout.default", "aten.bernoulli_.float"}
    assert drawn
    assert {op.module for op in trace.ops if op.random} == {"1"}


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.last = nn.Linear(4, 2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inner, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_replays(reentrant: bool, x: Tensor) -> None:
    trace = observed(Checkpointed(reentrant=reentrant), x.requires_grad_())
    replayed = [op for op in trace.ops if op.mode is Mode.REPLAY]
    assert [op.name for op in replayed if op.name == "aten.tanh.default"] == ["aten.tanh.default"]
    assert all(op.phase is Phase.BACKWARD for op in replayed)
    tanhs = ops_named(trace, "tanh.default")
    assert [trace.ops[i].mode for i in tanhs] == [Mode.NORMAL, Mode.REPLAY]
    backward = next(op for op in trace.ops if op.name == "aten.tanh_backward.default")
    assert backward.mode is Mode.NORMAL
    # What is replayed is never saved in forward.
    assert all(save.module != "inner.1" for _, save in saves_of(trace))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * x
        z = y + 1
        ctx.save_for_backward(x, z)
        return z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, _ = ctx.saved_tensors
        return 2 * grad * x


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(self.layer(x))


def test_a_custom_function_saves_inputs_and_outputs(x: Tensor) -> None:
    trace = observed(Custom(), x)
    first, last = ops_named(trace, "mul.Tensor")[0], ops_named(trace, "add.Tensor")[0]
    own = [(v, s) for v, s in saves_of(trace) if s.op == first]
    assert [save.as_input for _, save in own] == [True, False]
    assert [save.packed for _, save in own] == [last + 1, last + 1]
    assert own[1][0].producer == last
    backward = [op for op in trace.ops if op.forward_op == first]
    assert {op.name for op in backward} == {"aten.mul.Tensor"}


def test_passes_are_told_apart(x: Tensor) -> None:
    model = Chain()
    watch = Watch(model)
    outputs = [watch.call(model, x), watch.call(model, x)]
    pseudo_loss(outputs)
    trace = watch.finish()
    assert trace.roots == ("Chain", "Chain")
    ordinals = [(save.pass_index, save.ordinal) for _, save in saves_of(trace)]
    per_pass = len(ordinals) // 2
    assert ordinals == [(p, i) for p in range(2) for i in range(per_pass)]
    relus = ops_named(trace, "relu.default")
    assert [trace.ops[i].pass_index for i in relus] == [0, 1]
    for index in ops_named(trace, "threshold_backward.default"):
        op = trace.ops[index]
        assert op.forward_op in relus
        assert op.pass_index == relus.index(op.forward_op)


def test_modules_used_twice_and_modules_of_others(x: Tensor) -> None:
    outside = nn.Tanh()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x: Tensor) -> Tensor:
            return outside(self.layers[0](self.layers[0](x))) + x.exp()

    trace = observed(Twice(), x)
    assert [trace.ops[i].module for i in ops_named(trace, "addmm.default")] == ["layers.0"] * 2
    assert op_named(trace, "tanh.default")[1].module == "<Tanh>"
    assert op_named(trace, "exp.default")[1].module == "Twice"


class Retained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


def test_only_the_first_read_of_a_save_is_an_anchor(x: Tensor) -> None:
    model = Retained()
    watch = Watch(model)
    y = watch.call(model, x)
    y.backward(torch.ones_like(y), retain_graph=True)
    y.backward(torch.ones_like(y))
    trace = watch.finish()
    (save,) = (s for _, s in saves_of(trace) if trace.ops[s.op].name == "aten.tanh.default")
    assert len(save.reads) == 2
    assert save.reads[0] in trace.anchors
    assert save.reads[1] not in trace.anchors


class PartlyCompiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = torch.compile(self.body, backend="aot_eager", fullgraph=True)

    def body(self, x: Tensor) -> Tensor:
        return (x.sin() * x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_code_is_watched_as_it_will_run(x: Tensor) -> None:
    model = PartlyCompiled()
    traces = []
    for _ in range(2):
        model.zero_grad()
        traces.append(observed(model, x))
    assert traces[0].fingerprint == traces[1].fingerprint
    # Its partitioner saves less than autograd: the sine is computed again.
    assert len(ops_named(traces[0], "sin.default")) == 2
    start, _ = ops_named(traces[0], "sin.default")
    inner = [(value, save) for value, save in saves_of(traces[0]) if save.op == start]
    assert [save.as_input for _, save in inner] == [True, False]
    # Its backward drops all at once and goes on to use it.
    assert all(save.dropped == save.reads[0] for _, save in inner)
    assert all(storage_of(traces[0], value).death > save.dropped for value, save in inner)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(torch.eye(3).to_sparse(), self.layer(x)).tanh()


def test_sparse_saves_are_left_out(x: Tensor) -> None:
    trace = observed(Sparse(), x)
    assert all(save.stride for _, save in saves_of(trace))
    numbers = [save.ordinal for _, save in saves_of(trace)]
    # It was counted, so that the names of the others agree with what the engine sees.
    assert numbers != list(range(len(numbers)))


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.rrelu(self.layer(x), training=True)


def test_what_an_op_writes_after_saving_it_never_gains_from_moving(x: Tensor) -> None:
    trace = observed(Noisy(), x)
    at = next(i for i, op in enumerate(trace.ops) if "rrelu" in op.name)
    noise = [v for v, s in saves_of(trace) if s.op == at and v.storage in _written(trace, at)]
    for value in noise:
        storage = storage_of(trace, value)
        assert storage.released == storage.death


def _written(trace: Any, op: int) -> set[int]:
    return {trace.values[value].storage for value in trace.ops[op].writes}


def test_seconds_are_measured_or_absent(x: Tensor) -> None:
    timed = observed(Chain(), x, timed=True)
    assert all(op.device_seconds > 0 for op in timed.ops)
    assert all(op.host_seconds >= 0 and op.workspace_bytes == 0 for op in timed.ops)
    assert all(op.device_seconds == 0 for op in observed(Chain(), x).ops)
    assert 0 <= dispatch_seconds() < 1e-3


def test_held_bytes_are_those_of_live_storages(x: Tensor) -> None:
    watch = Watch()
    a = torch.ones(100)
    b = a + 1
    del a
    c = b * 2
    del b, c
    watch.observation.stop()
    assert held_bytes(watch.recorder, 1) == [400, 800, 800]
    assert held_bytes(watch.recorder, 512) == [512, 1024, 1024]
    assert watch.observation.peak_bytes(64) == 896


def test_unseen_bytes_are_there_throughout() -> None:
    watch = Watch()
    torch.ones(1) + 1
    watch.observation.stop()
    trace = assemble(watch.recorder, (), Source.EAGER, unseen_bytes=1000)
    last = trace.storages[-1]
    assert (last.kind, last.nbytes) == (StorageKind.OTHER, 1000)
    assert (last.birth, last.death) == (0, len(trace.ops))


def test_iterations_that_repeat_have_one_fingerprint(x: Tensor) -> None:
    model = nn.Sequential(Chain(), nn.Dropout(0.5))
    prints = []
    for _ in range(2):
        model.zero_grad()
        prints.append(observed(model, x).fingerprint)
    assert prints[0] == prints[1]
    model.zero_grad()
    assert observed(model, torch.ones(5, 4)).fingerprint != prints[0]


def test_watching_ends_whatever_lies_above() -> None:
    class Above(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    watch = Watch()
    with Above():
        watch.observation.stop()
        watch.observation.stop()
        torch.ones(1)
    assert watch.recorder.ops == []
