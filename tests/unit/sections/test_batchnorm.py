from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from belady.errors import SectionError
from belady.sections.batchnorm import _sum, moments
from belady.sections.wrap import wrap
from tests.unit.sections.comparing import (
    TOLERANCES,
    assert_alike,
    assert_same_in_sections,
    children,
    twins,
)


def block(**settings: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4, **settings),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, **settings), nn.ReLU(inplace=True)),
        nn.MaxPool2d(2),
    )


def images(samples: int = 7) -> Tensor:
    return torch.randn(samples, 3, 8, 8, generator=torch.Generator().manual_seed(1)) + 1


SETTINGS: list[dict[str, Any]] = [
    {},
    {"momentum": None},
    {"momentum": 0.0},
    {"affine": False},
    {"track_running_stats": False},
    {"eps": 0.1, "momentum": 1.0},
]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_statistics_are_those_of_the_batch(settings: dict[str, Any], dtype: torch.dtype) -> None:
    for x in (images(), images().requires_grad_()):
        assert_same_in_sections(block(**settings), x, children(range(5), 3), dtype=dtype)


@pytest.mark.parametrize("numbers", [[1], [1, 2], [0, 1], [1, 2, 3], [3], range(5)])
def test_wherever_the_run_begins_and_ends(numbers: list[int]) -> None:
    assert_same_in_sections(block(), images().requires_grad_(), children(numbers, 7))


def test_one_and_three_dimensions() -> None:
    for model, shape in (
        (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()), (6, 3)),
        (nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4), nn.Tanh()), (6, 3, 5)),
        (nn.Sequential(nn.Conv3d(3, 4, 2), nn.BatchNorm3d(4), nn.Tanh()), (6, 3, 4, 4, 4)),
    ):
        assert_same_in_sections(model, torch.randn(shape), children(range(3), 3))


def test_a_large_mean_cancels_nothing() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    x = torch.randn(64, 3) + 1e4
    exact = copy.deepcopy(model).double()(x.double())
    wrap(model, [children(range(2), 8)])
    # What is left is the mean's own rounding: 1e4 in float32, beside a deviation of 1.
    assert (model(x) - exact).abs().max() < 1e-3


def test_frozen_ones_and_the_mode_of_each() -> None:
    model = block()
    model[1].eval()
    model[3][1].requires_grad_(False)
    assert_same_in_sections(model, images(), children(range(5), 3))
    model.requires_grad_(False)
    model[3][1].weight.requires_grad_(True)
    assert_same_in_sections(model, images(), children(range(5), 3))
    model.eval()
    assert_same_in_sections(model, images().requires_grad_(), children(range(5), 3))


def test_autocast_keeps_the_type() -> None:
    model, twin, _ = twins(block(), children(range(5), 3), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = model(images()), twin(images())
    assert actual.dtype is expected.dtype is torch.bfloat16
    assert_alike([expected], [actual], torch.bfloat16)


def test_the_graph_of_another_call_does_not_notice() -> None:
    model = block()
    wrap(model, [children(range(5), 3)])
    # Too small for slices: plain BatchNorm saves the running statistics that the second call moves.
    loss = model(images(2)).sum()
    model(images())
    loss.backward()


def test_one_value_a_channel_is_an_error_as_ever() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    for samples in (torch.randn(1, 3), torch.randn(4, 3, 3, 3)):
        with pytest.raises(ValueError, match=r".") as plain:
            model(samples)
        undo = wrap(model, [children(range(2), 2)])
        with pytest.raises(ValueError, match=r".") as sectioned:
            model(samples)
        undo()
        assert str(plain.value) == str(sectioned.value)


class Own(nn.BatchNorm1d):
    pass


def test_others_are_refused_in_training_mode() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Own(3))
    with pytest.raises(SectionError, match="Own is a batch norm with code of its own"):
        wrap(model, [children(range(2), 2)])
    model.eval()
    assert_same_in_sections(model, torch.randn(4, 3), children(range(2), 2))


@pytest.mark.parametrize(
    "part",
    [
        torch.randn(3, 5).t(),
        torch.randn(5, 1).expand(5, 4),
        torch.randn(5, 8)[:, ::2],
        torch.randn(5, 3, 4, 6).contiguous(memory_format=torch.channels_last),
        torch.randn(5, 6, 3).transpose(1, 2),
        torch.randn(5, 3, 2, 4, 6).contiguous(memory_format=torch.channels_last_3d),
        torch.randn(1).expand(5, 3, 4, 6),
    ],
    ids=lambda part: str(tuple(part.shape)) + str(part.stride()),
)
def test_tensors_of_any_strides(part: Tensor) -> None:
    part = part.double()
    dims = [dim for dim in range(part.dim()) if dim != 1]
    variance, mean = torch.var_mean(part, dims, correction=0)
    for found, wanted in zip(moments(part), (variance, mean), strict=True):
        assert torch.allclose(found, wanted)
        assert found.shape == wanted.shape
    assert torch.allclose(_sum(part, part.dtype), part.sum(dims))


@pytest.mark.parametrize("loss", [lambda y: y.sum(), lambda y: y.sum(1).sin().sum()])
def test_gradients_that_are_expanded(loss: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    plain.double()
    sliced = copy.deepcopy(plain)
    wrap(sliced, [children(range(4), 2)])
    x = torch.randn(7, 6, dtype=torch.float64)
    for model in (plain, sliced):
        loss(model(x)).backward()
    for one, other in zip(plain.parameters(), sliced.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-12)


@pytest.mark.gpu
def test_channels_last_statistics_need_no_scratch_memory() -> None:
    part = torch.randn(16, 64, 112, 112, device="cuda").contiguous(
        memory_format=torch.channels_last
    )
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    variance, mean = moments(part)
    total = _sum(part, torch.float32)
    assert torch.cuda.max_memory_allocated() - before < part.nbytes // 4
    assert torch.allclose(variance, part.var((0, 2, 3), correction=0), rtol=1e-5)
    assert torch.allclose(mean, part.mean((0, 2, 3)), atol=1e-6)
    assert torch.allclose(total, part.sum((0, 2, 3)), atol=0.5)
