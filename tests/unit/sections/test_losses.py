"""Cross-entropy in slices of rows: the bits of plain PyTorch, and nothing else is touched."""

from __future__ import annotations

import gc
import inspect
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from belady.errors import SectionError
from belady.sections import losses
from belady.sections.losses import Losses
from tests.support.modes import Seeing
from tests.unit.measure.watching import observed

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PLAIN = F.cross_entropy


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(losses, "_LEAST_SLICE", 1 << 10)
    yield
    assert F.cross_entropy is PLAIN


def given(
    rows: int, classes: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows * classes)
    target = torch.randint(classes, (rows,), device=device)
    target[1::3] = 0
    return 5 * torch.randn(rows, classes, dtype=dtype, device=device), target


def results(logits: Tensor, target: Tensor, *, autocast: bool = False, **options: Any) -> Any:
    leaf = logits.clone().requires_grad_()
    with torch.autocast(logits.device.type, torch.bfloat16) if autocast else nullcontext():
        loss = F.cross_entropy(leaf, target, **options)
    loss.backward(torch.full_like(loss, 1.7))
    return loss.detach(), leaf.grad


def in_slices(*arguments: Any, **options: Any) -> tuple[int, Any]:
    """Bytes of the logarithms that were not made at once, and the results."""
    standing = Losses(arguments[0].device, 1)
    standing.attach()
    try:
        found = results(*arguments, **options)
    finally:
        standing.detach()
    return standing.largest_bytes, found


def equal(one: Any, other: Any) -> bool:
    return all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [1, 16, 333])
@pytest.mark.parametrize("classes", [1, 64, 1031, 5003])
def test_bits(
    classes: int, rows: int, dtype: torch.dtype, autocast: bool, reduction: str, device: str
) -> None:
    logits, target = given(rows, classes, dtype, device)
    for ignored in (-100, 0):
        options = {"autocast": autocast, "reduction": reduction, "ignore_index": ignored}
        nbytes, found = in_slices(logits, target, **options)
        assert nbytes >= rows * classes * 2
        assert equal(found, results(logits, target, **options))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_logarithm_of_each_row_is_cast_where_autocast_casts_all(
    dtype: torch.dtype, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, target = given(333, 1031, dtype)
    leaf = logits.clone().requires_grad_()
    # What PyTorch does on a GPU: logarithms in half precision, and all of them made float32.
    loss = F.nll_loss(F.log_softmax(leaf, 1).float(), target, ignore_index=0, reduction=reduction)
    loss.backward(torch.full_like(loss, 1.7))
    monkeypatch.setattr(losses, "casts_logarithms", lambda *_: True)
    assert losses.is_torchs(PLAIN)
    options = {"autocast": True, "ignore_index": 0, "reduction": reduction}
    assert equal(in_slices(logits, target, **options)[1], (loss.detach(), leaf.grad))


@pytest.mark.parametrize("casts", [False, True])
def test_the_gradient_of_a_slice_is_made_where_it_is_to_be(
    casts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "casts_logarithms", lambda *_: casts)
    logits, target = given(64, 500, torch.bfloat16)
    slices = 64 // losses._ROWS
    leaf, standing = logits.requires_grad_(), Losses(logits.device, 1)
    standing.attach()
    try:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(leaf, target)
        with Seeing() as seen:
            loss.backward()
    finally:
        standing.detach()
    aten, counts = torch.ops.aten, Counter(seen.ops)
    made = slices if casts else 0  # else autograd has the gradient elsewhere
    assert counts[aten._log_softmax_backward_data.out] == made
    assert counts[aten._log_softmax_backward_data.default] == slices - made
    assert counts[aten.copy_.default] == slices - made


def foreign(input: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Of another library, in the same place."""
    return PLAIN(input, target, **options)


def test_what_another_library_put_there_is_called_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(losses, "casts_logarithms", lambda *given: asked.append(given))
    monkeypatch.setattr(F, "cross_entropy", foreign)
    logits, target = given(333, 1031, torch.bfloat16)
    nbytes, found = in_slices(logits, target, autocast=True)
    assert nbytes
    assert not asked
    monkeypatch.undo()
    assert equal(found, results(logits, target, autocast=True))


@pytest.mark.parametrize("device", DEVICES)
def test_where_autocast_casts_all_logarithms(device: str) -> None:
    # On a CPU it casts the logits.
    of, half = losses.casts_logarithms, torch.bfloat16
    assert of(PLAIN, torch.device(device), half, half) is (device == "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_logits_of_any_stride_and_all_rows_ignored(device: str) -> None:
    logits, target = given(120, 77, device=device)
    for tensor in (logits.t().contiguous().t(), logits[:, ::2], logits[::3]):
        few = target[: len(tensor)] % tensor.shape[1]
        assert equal(in_slices(tensor, few)[1], results(tensor, few))
    none = torch.full_like(target, -100)
    nbytes, found = in_slices(logits, none)
    assert nbytes
    assert found[0].isnan()
    assert equal(found, results(logits, none))


class Loss(nn.Module):
    """Of a language model, under autocast."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(logits, target)


def test_slices_hold_a_part_of_the_logarithms() -> None:
    logits, target = given(4096, 500, torch.bfloat16)
    logits.requires_grad_()
    before = observed(Loss(), logits, target)
    standing = Losses(logits.device, 1)
    standing.attach()
    try:
        after = observed(Loss(), logits, target)
    finally:
        standing.detach()
    # What is left are logits, what autograd saves of them, and their gradient.
    half, single = logits.numel() * 2, logits.numel() * 4
    assert Counter(it.nbytes for it in before.storages if it.nbytes >= half)[single] >= 3
    assert [it.nbytes for it in after.storages if it.nbytes >= half] == 3 * [half]


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 0.1},
        {"weight": torch.ones(7)},
        {"reduce": True, "size_average": True},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:size_average and reduce")
def test_what_is_rare_is_left_to_plain_pytorch(options: dict[str, Any]) -> None:
    logits, target = given(9, 7)
    nbytes, found = in_slices(logits, target, **options)
    assert nbytes == 0
    assert equal(found, results(logits, target, **options))


def test_so_are_other_shapes_probabilities_and_small_ones() -> None:
    logits, target = given(12, 7)
    images = logits.view(3, 7, 4)
    assert in_slices(images, target.view(3, 4))[0] == 0
    assert in_slices(logits, torch.softmax(logits, 1))[0] == 0
    standing = Losses(logits.device, 12 * 7 * 4 + 1)
    standing.attach()
    results(logits, target)
    with torch.no_grad():
        F.cross_entropy(logits, target)
    standing.detach()
    assert standing.largest_bytes == 0


def test_errors_are_those_of_plain_pytorch() -> None:
    logits, target = given(12, 7)
    standing = Losses(logits.device, 1)
    standing.attach()
    try:
        for wrong in (target + 7, target - 9, target[:5], target.float()):
            with pytest.raises((IndexError, ValueError, RuntimeError)) as ours:
                F.cross_entropy(logits.requires_grad_(), wrong)
            with pytest.raises(ours.type, match=re.escape(str(ours.value))):
                PLAIN(logits, wrong)
        with pytest.raises(ValueError, match="not a valid value for reduction"):
            F.cross_entropy(logits, target, reduction="median")
    finally:
        standing.detach()


def test_gradients_of_gradients_and_forward_mode() -> None:
    logits, target = given(40, 11, torch.float64)

    def second() -> tuple[Tensor, ...]:
        leaf = logits.clone().requires_grad_()
        loss = F.cross_entropy(leaf.tanh(), target, reduction="sum")
        (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
        first.square().sum().backward()
        assert leaf.grad is not None
        return first.detach(), leaf.grad

    def forward() -> tuple[Tensor, ...]:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(logits.clone().requires_grad_(), logits)
            return tuple(forward_ad.unpack_dual(F.cross_entropy(dual, target)))

    # Its rules for forward mode are PyTorch's own scripted functions.
    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
    for make in (second, forward):
        plain = make()
        standing = Losses(logits.device, 1)
        standing.attach()
        found = make()
        standing.detach()
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(found, plain, strict=True))


def test_backward_twice_and_a_graph_that_is_kept() -> None:
    logits, target = given(40, 11)
    standing = Losses(logits.device, 1)
    standing.attach()
    leaf = logits.clone().requires_grad_()
    loss = F.cross_entropy(leaf, target)
    standing.detach()
    once = torch.full_like(loss, 1.7)
    loss.backward(once, retain_graph=True)
    loss.backward(once)
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, 2 * results(logits, target)[1])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_logits_that_are_changed_afterwards() -> None:
    logits, target = given(40, 11)
    standing = Losses(logits.device, 1)
    standing.attach()
    made = logits.requires_grad_() * 2
    loss = F.cross_entropy(made, target)
    standing.detach()
    made.detach().zero_()
    with pytest.raises(SectionError, match=r"logits\.clone\(\)"):
        loss.backward()


def test_the_place_is_given_back_in_any_order() -> None:
    one, two = (Losses(torch.device("cpu"), 1) for _ in range(2))
    one.attach()
    one.attach()
    assert inspect.signature(F.cross_entropy) == inspect.signature(PLAIN)
    two.attach()
    standing = F.cross_entropy
    one.detach()
    assert F.cross_entropy is standing
    logits, target = given(12, 7)
    nn.CrossEntropyLoss()(logits.requires_grad_(), target)
    assert (one.largest_bytes, two.largest_bytes) == (0, 12 * 7 * 4)
    two.detach()
    assert F.cross_entropy is PLAIN


def test_what_somebody_else_put_there_stays() -> None:
    standing = Losses(torch.device("cpu"), 1)
    standing.attach()
    ours = F.cross_entropy

    def other(*args: Any, **kwargs: Any) -> Tensor:
        return ours(*args, **kwargs)

    F.cross_entropy = other
    try:
        standing.detach()
        assert F.cross_entropy is other
        logits, target = given(12, 7)
        assert other(logits.requires_grad_(), target).grad_fn.name() == "NllLossBackward0"
    finally:
        F.cross_entropy = PLAIN


def test_hooks_on_logits_run_once() -> None:
    logits, target = given(12, 7)

    def found(*, create_graph: bool) -> tuple[Any, ...]:
        leaf = logits.clone().requires_grad_()
        made, calls = leaf * 1, []
        made.register_hook(lambda gradient: (calls.append(1), gradient * 2)[1])
        made.retain_grad()
        loss = F.cross_entropy(made, target)
        gradients = torch.autograd.grad(loss, (leaf, made), create_graph=create_graph)
        return len(calls), *(it.detach() for it in gradients)

    for create_graph in (False, True):
        count, *plain = found(create_graph=create_graph)
        standing = Losses(logits.device, 1)
        standing.attach()
        ours, *sliced = found(create_graph=create_graph)
        standing.detach()
        assert count == ours == 1
        assert all(map(torch.allclose, sliced, plain))


def test_several_gradients_at_once() -> None:
    logits, target = given(6, 5, torch.float64)

    def found() -> Tensor:
        leaf = logits.clone().requires_grad_()
        losses_ = F.cross_entropy(leaf, target, reduction="none")
        each = torch.eye(6, dtype=torch.float64)
        return torch.autograd.grad(losses_, leaf, each, is_grads_batched=True)[0]

    plain = found()
    standing = Losses(logits.device, 1)
    standing.attach()
    sliced = found()
    standing.detach()
    assert torch.allclose(sliced, plain)


def test_graphs_that_are_written_down_have_the_plain_loss() -> None:
    logits, target = given(12, 7)
    standing = Losses(logits.device, 1)
    standing.attach()
    try:
        graph = make_fx(lambda one, two: F.cross_entropy(one, two))(logits.requires_grad_(), target)
        names = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
        assert {"aten._log_softmax.default", "aten.nll_loss_forward.default"} <= names
        assert standing.largest_bytes == 0
        with pytest.raises(TypeError, match="cross_entropy"):
            F.cross_entropy(logits, target, unknown=1)  # type: ignore[call-arg]
    finally:
        standing.detach()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiler_does_as_ever(backend: str) -> None:
    logits, target = given(40, 11)
    plain = results(logits, target)
    standing = Losses(logits.device, 1)
    standing.attach()
    compiled = torch.compile(lambda a, b: F.cross_entropy(a, b), backend=backend, fullgraph=True)
    leaf = logits.clone().requires_grad_()
    try:
        loss = compiled(leaf, target)
    finally:
        standing.detach()
    loss.backward(torch.full_like(loss, 1.7))
    assert equal((loss.detach(), leaf.grad), plain)


def test_whoever_forgets_to_close_leaves_plain_pytorch() -> None:
    standing = Losses(torch.device("cpu"), 1)
    standing.attach()
    del standing
    gc.collect()
    try:
        logits, target = given(12, 7)
        assert F.cross_entropy(logits.requires_grad_(), target).grad_fn.name() == "NllLossBackward0"
    finally:
        F.cross_entropy = PLAIN
