from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import belady
from belady.errors import SectionError
from tests.unit.measure.watching import observed, saves_of
from tests.unit.sections.test_apply import peak

TOKENS, FEATURES, CLASSES = (3, 13), 8, 101
# Of the largest number: sums in another order, and in bfloat16 one rounding more or less.
TOLERANCES = {
    torch.float64: 1e-14,
    torch.float32: 5e-6,
    torch.float16: 3e-3,
    torch.bfloat16: 2e-2,
}
Loss = Callable[..., Tensor]


def plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    found = F.cross_entropy(logits.reshape(-1, len(weight)), targets.reshape(-1), **options)
    return found.view(targets.shape) if options.get("reduction") == "none" else found


def given(dtype: torch.dtype, biased: bool = True) -> tuple[list[Tensor], Tensor]:
    """Hidden, weight and perhaps bias, and targets of which some do not count."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(*TOKENS, FEATURES), (CLASSES, FEATURES), (CLASSES,)][: 2 + biased]
    numbers = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    targets = torch.randint(CLASSES, TOKENS, generator=generator)
    targets[:, ::4] = -100
    return [tensor.to(dtype) for tensor in numbers], targets


def found(loss: Loss, tensors: list[Tensor], targets: Tensor, **options: Any) -> list[Tensor]:
    hidden, weight, *bias = (tensor.clone().requires_grad_() for tensor in tensors)
    result = loss(hidden, weight, targets, *bias, **options)
    scale = torch.arange(1, result.numel() + 1).view(result.shape)
    (result * scale).sum().backward()
    return [result.detach(), *(t.grad for t in (hidden, weight, *bias) if t.grad is not None)]


def assert_near(expected: list[Tensor], actual: list[Tensor], tolerance: float) -> None:
    for one, two in zip(expected, actual, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (two.dtype, two.shape, two.stride())
        assert (one.double() - two.double()).abs().max() <= tolerance * one.double().abs().max()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("slices", [1, 3, CLASSES, 1000, None])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"label_smoothing": 0.1},
        {"label_smoothing": 1.0, "reduction": "none"},
        {"ignore_index": 7},
    ],
    ids=str,
)
def test_results_are_near_plain_ones(
    options: dict[str, Any], slices: int | None, dtype: torch.dtype
) -> None:
    tensors, targets = given(dtype)
    targets = targets.where(targets >= 0, options.get("ignore_index", -100))
    for biased in (True, False):
        some = tensors[: 2 + biased]
        expected = found(plain, some, targets, **options)
        actual = found(belady.cross_entropy, some, targets, slices=slices, **options)
        assert_near(expected, actual, TOLERANCES[dtype])


def test_bfloat16_is_as_near_the_truth_as_plain_pytorch() -> None:
    tensors, targets = given(torch.bfloat16)
    truth = found(plain, [tensor.double() for tensor in tensors], targets)
    gaps = []
    for loss, options in ((plain, {}), (belady.cross_entropy, {"slices": 50})):
        results = found(loss, tensors, targets, **options)
        gaps.append([(a - b).abs().max() for a, b in zip(truth, results, strict=True)])
    assert all(ours <= 1.5 * theirs for theirs, ours in zip(*gaps, strict=True))


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2, "reduction": "none"}], ids=str)
def test_gradients_are_those_of_small_differences(options: dict[str, Any]) -> None:
    (hidden, weight, bias), targets = given(torch.float64)
    tensors = [t.requires_grad_() for t in (hidden[:1, :3], weight[:7], bias[:7])]

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return belady.cross_entropy(
            hidden, weight, targets[:1, :3] % 7, bias, slices=3, ignore_index=2, **options
        )

    assert torch.autograd.gradcheck(loss, tensors)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_only_what_needs_a_gradient_gets_one(at: int) -> None:
    tensors, targets = given(torch.float64)
    tensors[at].requires_grad_()
    grads = []
    for loss in (plain, belady.cross_entropy):
        hidden, weight, bias = tensors
        grads.append(torch.autograd.grad(loss(hidden, weight, targets, bias), tensors[at])[0])
    assert_near([grads[0]], [grads[1]], TOLERANCES[torch.float64])


def test_autocast() -> None:
    tensors, targets = given(torch.float32)
    results = []
    for loss in (plain, belady.cross_entropy):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(found(loss, tensors, targets))
    assert results[0][0].dtype is torch.float32
    assert_near(*results, tolerance=TOLERANCES[torch.bfloat16])
    assert (results[0][0] - results[1][0]).abs() <= TOLERANCES[torch.float32] * results[0][0]


def test_a_weight_used_again_under_autocast_keeps_its_gradient() -> None:
    tensors, targets = given(torch.float32)
    hidden, weight = tensors[0], nn.Parameter(tensors[1])
    with torch.autocast("cpu", torch.bfloat16):
        belady.cross_entropy(hidden, weight, targets)
        assert F.linear(hidden, weight).requires_grad


def test_backward_outside_of_or_inside_autocast_is_the_same() -> None:
    tensors, targets = given(torch.float32)
    grads = []
    for inside in (False, True):
        weight = tensors[1].clone().requires_grad_()
        loss = belady.cross_entropy(tensors[0], weight, targets)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            grads.append(torch.autograd.grad(loss, weight)[0])
    assert torch.equal(*grads)


def test_no_token_that_counts() -> None:
    tensors, targets = given(torch.float32)
    for chosen in (torch.full_like(targets, -100), targets[:0]):
        some = [tensors[0][: len(chosen)], *tensors[1:]]
        expected, actual = (found(loss, some, chosen) for loss in (plain, belady.cross_entropy))
        for one, two in zip(expected, actual, strict=True):
            assert torch.equal(one.nan_to_num(7), two.nan_to_num(7))


def test_classes_that_are_shut_out() -> None:
    (hidden, weight, bias), targets = given(torch.float64)
    bias[:50] = float("-inf")
    targets = targets.where(targets < 0, targets % 50 + 50)
    results = [
        found(loss, [hidden, weight, bias], targets) for loss in (plain, belady.cross_entropy)
    ]
    assert_near(*results, tolerance=TOLERANCES[torch.float64])


def test_backward_twice_and_single_tokens() -> None:
    (hidden, weight, _), targets = given(torch.float64)
    weight.requires_grad_()
    loss = belady.cross_entropy(hidden[0, 1], weight, targets[0, 1])
    loss.backward(retain_graph=True)
    loss.backward()
    (once,) = torch.autograd.grad(plain(hidden[0, 1], weight, targets[0, 1]), weight)
    assert weight.grad is not None
    assert_near([2 * once], [weight.grad], TOLERANCES[torch.float64])


def test_a_weight_changed_before_backward_is_noticed() -> None:
    (hidden, weight, _), targets = given(torch.float64)
    weight.requires_grad_()
    loss = belady.cross_entropy(hidden, weight, targets)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Head(nn.Linear):
    def __init__(self, loss: Loss) -> None:
        super().__init__(8, 1024)
        self.loss = loss

    def forward(self, hidden: Tensor) -> Tensor:
        targets = torch.arange(hidden.shape[:-1].numel()).view(hidden.shape[:-1])
        return self.loss(hidden, self.weight, targets, self.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_that_of_slices(dtype: torch.dtype) -> None:
    hidden = torch.randn(4, 128, 8, dtype=dtype, requires_grad=True)
    logits = 4 * 128 * 1024 * dtype.itemsize
    traces = [observed(Head(loss).to(dtype), hidden) for loss in (plain, belady.cross_entropy)]
    assert peak(traces[0]) > 2 * logits
    # A slice is a thirty-second of the logits; the rest are weights, the input, and gradients.
    assert peak(traces[1]) < logits / 4
    saved = {save.shape for _, save in saves_of(traces[1])}
    assert saved == {(512, 8), (1024, 8), (1024,), (512,), ()}


def test_a_gradient_of_a_gradient_is_refused() -> None:
    (hidden, weight, _), targets = given(torch.float64)
    loss = belady.cross_entropy(hidden, weight.requires_grad_(), targets)
    with pytest.raises(SectionError, match="create_graph=True"):
        torch.autograd.grad(loss, weight, create_graph=True)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"reduction": "batchmean"}, "reduction must be one of mean, sum, none, not 'batchmean'"),
    ({"slices": 0}, "slices must be an integer of at least 1, not 0"),
    ({"slices": True}, "slices must be an integer"),
    ({"label_smoothing": 1.5}, "label_smoothing must be between 0 and 1"),
    ({"bias": torch.zeros(3)}, "do not go together"),
    ({"weight": torch.zeros(5, 9)}, "hidden of shape (3, 13, 8), weight of (5, 9)"),
    ({"weight": torch.zeros(8)}, "do not go together"),
    ({"targets": torch.zeros(3, 12, dtype=torch.int64)}, "targets of (3, 12)"),
    ({"targets": torch.zeros(3, 13)}, "must be class indices of int64, not torch.float32"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    (hidden, weight, _), targets = given(torch.float32)
    with pytest.raises(ValueError, match=re.escape(message)):
        belady.cross_entropy(**{"hidden": hidden, "weight": weight, "targets": targets} | options)


@pytest.mark.parametrize("target", [CLASSES, -1])
def test_a_target_that_is_no_class_is_refused(target: int) -> None:
    (hidden, weight, _), targets = given(torch.float32)
    targets[0, 1] = target
    with pytest.raises(RuntimeError, match="a target is none of 101 classes"):
        belady.cross_entropy(hidden, weight, targets)
