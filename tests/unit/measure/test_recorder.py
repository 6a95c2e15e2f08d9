from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from belady.ir.trace import Mode, Need, Phase, StorageKind
from belady.measure.clock import CpuClock, NoClock
from belady.measure.recorder import Recorder
from belady.measure.records import draws
from tests.unit.measure.watching import CPU, observed


def recorder(*, timed: bool = False) -> Recorder:
    return Recorder(CPU, CpuClock() if timed else NoClock())


def named(it: Recorder) -> list[str]:
    return [op.name for op in it.ops]


def test_ops_read_and_write_values() -> None:
    a, b = torch.ones(3), torch.ones(3)
    it = recorder()
    with it:
        c = a + b
        d = c * a
    assert named(it) == ["aten.add.Tensor", "aten.mul.Tensor"]
    assert [op.reads for op in it.ops] == [(0, 1), (2, 0)]
    assert [op.writes for op in it.ops] == [(2,), (3,)]
    assert [value.producer for value in it.values] == [-1, -1, 0, 1]
    assert [use.op for use in it.values[0].uses] == [0, 1]
    assert [storage.nbytes for storage in it.storages] == [12] * 4
    assert d.sum() == 6


def test_a_storage_is_born_with_its_op_and_dies_with_its_last_tensor() -> None:
    it = recorder()
    with it:
        a = torch.ones(3)
        b = a + 1
        view = b[1:]
        del b
        c = view * 2
        del view
        c = c + 1
    assert named(it)[0] == "aten.ones.default"
    lives = [storage.lives for storage in it.storages]
    # a; b, held by its view until op 4 is issued; c, replaced by what op 4 makes.
    assert lives == [[[0, -1]], [[1, 4]], [[3, 5]], [[4, -1]]]
    assert len(a) == len(c) + 1


def test_views_have_the_value_of_their_base() -> None:
    a = torch.ones(4, 4)
    it = recorder()
    with it:
        a.t()[1:].unsqueeze(0) + 1
    assert len(it.storages) == 2
    assert all(op.writes == () for op in it.ops[:-1])
    assert it.ops[-1].reads == (0,)


def test_in_place_ops_write_a_new_version() -> None:
    a = torch.ones(4)
    view = a[:2]
    it = recorder()
    with it:
        b = a + 1
        view.add_(b[:2])
        a * 2
    add = next(op for op in it.ops if op.name == "aten.add_.Tensor")
    assert add.mutates
    assert not it.ops[0].mutates
    (written,) = add.writes
    assert (it.values[written].storage, it.values[written].version) == (0, 1)
    assert add.reads[0] == 0
    assert it.ops[-1].reads == (written,)


def test_out_arguments_are_written() -> None:
    a, out = torch.ones(3), torch.empty(3)
    it = recorder()
    with it:
        torch.add(a, a, out=out)
        torch._foreach_add_([a, out], 1.0)
    storages = {it.values[v].storage for v in it.ops[0].writes}
    assert storages == {1}
    assert {it.values[v].storage for v in it.ops[1].writes} == {0, 1}
    assert [op.mutates for op in it.ops] == [True, True]


def test_an_address_names_one_storage_even_when_memory_is_used_again() -> None:
    it = recorder()
    with it:
        for _ in range(50):
            torch.ones(1000)
    assert len(it.storages) == 50
    assert all(storage.lives == [[i, i + 1]] for i, storage in enumerate(it.storages))


def test_random_ops_are_marked() -> None:
    x = torch.ones(100)
    it = recorder()
    with it:
        F.dropout(x, 0.5)
        torch.rand(3)
        x + 1
    marks = {op.name: op.random for op in it.ops}
    assert marks["aten.rand.default"]
    assert any(random for name, random in marks.items() if "dropout" in name or "bernoulli" in name)
    assert not marks["aten.add.Tensor"]


@pytest.mark.parametrize(
    ("forward", "name", "needs"),
    [
        (F.relu, "aten.threshold_backward.default", {Need.VALUES, Need.SIGN}),
        (lambda x: F.threshold(x, 0.5, 0.0), "aten.threshold_backward.default", {Need.VALUES}),
        (
            lambda x: F.max_pool2d(x[None, None], 2),
            "aten.max_pool2d_with_indices_backward.default",
            {Need.VALUES, Need.SHAPE},
        ),
        (torch.exp, "aten.mul.Tensor", {Need.VALUES}),
    ],
    ids=["relu", "threshold", "pool", "exp"],
)
def test_what_backward_needs(forward: Any, name: str, needs: set[Need]) -> None:
    x = torch.rand(4, 4, requires_grad=True)
    it = recorder()
    with it:
        y = forward(x)
        y.backward(torch.ones_like(y))
    (at,) = (i for i, op in enumerate(it.ops) if op.name == name)
    assert {use.need for value in it.values for use in value.uses if use.op == at} == needs


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "pool",
    [
        lambda x: F.max_pool2d(x, 3, 2, 1),
        lambda x: F.adaptive_max_pool2d(x, 3),
        lambda x: F.avg_pool2d(x, 3, 2, 1),
        lambda x: F.adaptive_avg_pool2d(x, 3),
        lambda x: F.max_pool3d(x[:, None], 2),
        lambda x: F.adaptive_max_pool3d(x[:, None], 2),
        lambda x: F.avg_pool3d(x[:, None], 2),
        lambda x: F.adaptive_avg_pool3d(x[:, None], 2),
    ],
    ids=["max", "amax", "avg", "aavg", "max3d", "amax3d", "avg3d", "aavg3d"],
)
def test_the_backward_of_a_pooling_reads_nothing_of_its_input(
    pool: Any, layout: torch.memory_format, device: str
) -> None:
    x = torch.randn(2, 8, 12, 12, device=device).contiguous(memory_format=layout)
    x.requires_grad_()
    y = pool(x)
    gradient = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, x, gradient, retain_graph=True)
    it = Recorder(torch.device(device), NoClock())
    with it:
        torch.autograd.grad(y, x, gradient, retain_graph=True)
    needs = {use.need for value in it.values for use in value.uses}
    assert Need.SHAPE in needs
    with torch.no_grad():
        x.data.fill_(torch.nan)
    (found,) = torch.autograd.grad(y, x, gradient)
    assert torch.equal(found, expected)


def test_phases_follow_autograd() -> None:
    layer = nn.Linear(2, 2)
    it = recorder()
    with it:
        y = layer(torch.ones(1, 2))
        it.phase = Phase.LOSS
        loss = y.sum()
        loss.backward()
        it.phase = Phase.OPTIMIZER
        with torch.no_grad():
            layer.weight.sub_(layer.weight)
    phases = {op.name: op.phase for op in it.ops}
    assert phases["aten.addmm.default"] is Phase.FORWARD
    assert phases["aten.sum.default"] is Phase.LOSS
    assert phases["aten.mm.default"] is Phase.BACKWARD
    assert phases["aten.sub_.Tensor"] is Phase.OPTIMIZER
    assert all(op.mode is Mode.NORMAL for op in it.ops)


def test_work_of_our_own_is_not_seen() -> None:
    it = recorder()
    with it:
        with it.aside():
            torch.ones(3)
        torch.ones(3)
    assert len(it.ops) == 1


def test_an_op_that_raises_leaves_the_clock_in_step() -> None:
    it = recorder(timed=True)
    with it:
        with pytest.raises(RuntimeError):
            torch.mm(torch.ones(2, 3), torch.ones(2, 3))
        torch.ones(1) + 1
    assert len(it.clock.results()) == len(it.ops) == 5
    failed = next(op for op in it.ops if op.name == "aten.mm.default")
    assert failed.writes == ()


def test_saves_and_their_life() -> None:
    a, b = torch.ones(3), torch.arange(6.0).view(2, 3).t()[1:]
    it = recorder()
    it.modules.append("layer")
    with it:
        a + 1
        save = it.packed(b, 2, 7)
        a + 1
        it.read(save)
        a + 1
        it.read(save)
        it.dropped(save)
    (raw,) = it.saves
    assert (raw.pass_index, raw.ordinal, raw.module) == (2, 7, "layer")
    assert (raw.shape, raw.stride, raw.offset, raw.dtype) == ((2, 2), (1, 3), 1, "float32")
    assert (raw.packed, raw.reads, raw.dropped) == (1, [2, 3], 3)
    assert it.values[raw.value].producer == -1


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3).to_sparse(),
        torch.ones(3, device="meta"),
        torch.ones(3).to_mkldnn(),
    ],
    ids=["coo", "meta", "mkldnn"],
)
def test_odd_tensors_are_named_but_not_recorded(tensor: Tensor) -> None:
    it = recorder()
    save = it.packed(tensor, 0, 0)
    it.read(save)
    it.reloaded(save, tensor)
    it.dropped(save)
    it.adopt(tensor, StorageKind.STATE)
    it.adopt_new(tensor, StorageKind.INPUT)
    assert it.saves[save].value == -1
    assert it.storages == []


def test_bytes_that_come_back_continue_their_storage() -> None:
    it = recorder()
    with it:
        a = torch.ones(3)
        save = it.packed(a, 0, 0)
        content = [a.clone()]
        it.contents[id(content)] = save
        del a
        torch.ones(1)
        with it.aside():
            back = torch.ones(3)
        it.brought(content, back)
        it.brought(object(), back)
        it.reloaded(save, back)
        back * 2
    assert it.storages[0].lives == [[0, 2], [3, -1]]
    assert it.ops[-1].reads == (0,)


def test_adopting_says_what_a_tensor_is_for() -> None:
    it = recorder()
    x = torch.ones(3)
    it.adopt(x, StorageKind.PARAMETER)
    it.adopt_new(x[1:], StorageKind.INPUT)
    assert [storage.kind for storage in it.storages] == [StorageKind.PARAMETER]
    it.adopt(x.view(3, 1), StorageKind.BUFFER)
    assert [storage.kind for storage in it.storages] == [StorageKind.BUFFER]
    with it:
        y = x + 1
    it.adopt(y, StorageKind.STATE)
    assert it.storages[1].kind is StorageKind.STATE


def test_it_keeps_no_bytes_alive() -> None:
    it = recorder()
    with it:
        x = torch.ones(10)
        y = x + 1
    seen: list[int] = []
    weakref.finalize(x.untyped_storage(), seen.append, 1)
    del x
    gc.collect()
    assert seen == [1]
    assert len(y) == 10


def test_higher_order_operators_are_one_op() -> None:
    def scaled(x: Tensor) -> Tensor:
        return x * 2

    x = torch.ones(3)
    it = recorder()
    with it:
        y = torch.cond(torch.tensor(True), scaled, scaled, (x,))
    assert named(it)[-1] == "cond"
    assert it.ops[-1].writes
    assert y.tolist() == [2.0] * 3


@pytest.mark.parametrize("probability", [0.0, 0.5])
def test_attention_draws_numbers_for_its_dropout_alone(probability: float) -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, dropout_p=probability)

    x = torch.randn(2, 4, 8, 16, requires_grad=True)
    drawing = [op.name for op in observed(Attention(), x).ops if op.random]
    assert bool(drawing) == (probability > 0)
    attend = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert draws(attend, (x, x, x), {"dropout_p": probability}) == (probability > 0)
    assert draws(attend, (x, x, x, probability), {}) == (probability > 0)
    assert not draws(attend, (x, x, x), {})
    assert not draws(torch.ops.aten.relu.default, (x,), {})
    assert draws(torch.ops.aten.bernoulli.default, (x,), {})
