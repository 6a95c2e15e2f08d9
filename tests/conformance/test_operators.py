"""`save_on` changes no gradient of any operator that PyTorch knows, and hides no error.

Operators and samples come from PyTorch's own database. Without options a slice is run:
every `STRIDE`-th operator and the ones of `CHOSEN`, a few samples each. All operators, with up to
`MOST_SAMPLES` each (twenty minutes on two cores)::

    pytest tests/conformance/test_operators.py --all-operators
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.autograd_function_db import autograd_function_db
from torch.testing._internal.common_methods_invocations import op_db

import belady
from tests.support.operators import (
    STALE,
    Mode,
    Report,
    Sample,
    differentiate,
    left_over,
    same,
    samples,
)

TIERS = ("host", "disk", "encoded", "device")
STRIDE, OFFSET = 20, 7
SAMPLES, MOST_SAMPLES = 2, 60  # evenly spread over those of an operator
# Each saves something in a way of its own.
CHOSEN = frozenset(
    {
        "cumprod", "exp", "fft.rfft", "gather", "index_put", "linalg.cond", "linalg.det",
        "linalg.eigh", "linalg.slogdet", "linalg.svd", "logcumsumexp", "masked_select", "matmul",
        "nn.functional.batch_norm", "nn.functional.conv2d", "nn.functional.dropout",
        "nn.functional.embedding", "nn.functional.max_pool2d", "nn.functional.rrelu",
        "nn.functional.scaled_dot_product_attention", "nn.functional.silu", "norm", "prod", "sgn",
        "sort", "view_as_complex", "where",
    }
)  # fmt: skip
# LAPACK's driver gives other last bits from one call to the next, also in plain PyTorch.
UNSTEADY = frozenset({"linalg.lstsq"})
OPERATORS = [op for op in (*op_db, *autograd_function_db) if op.supports_autograd]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "operator" not in metafunc.fixturenames:
        return
    everything = metafunc.config.getoption("--all-operators", default=False)
    chosen = [
        op
        for number, op in enumerate(OPERATORS)
        if everything or number % STRIDE == OFFSET or op.name in CHOSEN
    ]
    metafunc.parametrize("operator", chosen, ids=lambda op: op.formatted_name)
    metafunc.parametrize("limit", [MOST_SAMPLES if everything else SAMPLES], ids=["samples"])


def dtypes(operator: Any, device: str) -> list[torch.dtype]:
    """One real and one complex type that the operator can differentiate."""
    able = operator.supported_backward_dtypes(device)
    real = [t for t in (torch.float32, torch.float64, torch.bfloat16) if t in able]
    return real[:1] + [t for t in (torch.complex64,) if t in able]


def modes(operator: Any, device: str) -> list[tuple[Mode, Callable[..., Any]]]:
    found = [(mode, operator.op) for mode in (Mode.TWICE, *STALE)]
    if operator.supports_gradgrad:
        found.append((Mode.DOUBLE, operator.op))
    if operator.inplace_variant is not None and operator.supports_inplace_autograd:
        found.append((Mode.IN_PLACE, operator.inplace_variant))
    return found


def kept_what_was_overwritten(call: Sample, mode: Mode, expected: Any, found: Any) -> bool:
    """Whether plain autograd used an overwritten value unawares, and belady the one saved.

    `torch.kron` saves a view that does not share the version of what it views.
    """
    missed = mode in STALE and not isinstance(expected, Exception)
    return missed and same(differentiate(call, Mode.FRESH), found)


def check_sample(operator: Any, device: str, sample: Any, what: str, report: Report) -> None:
    for mode, function in modes(operator, device):
        call = Sample(function, sample)
        expected = differentiate(call, mode)
        if not same(expected, differentiate(call, mode)):
            report.unrepeatable += 1
            continue
        for tier in TIERS:
            found = differentiate(call, mode, lambda tier=tier: belady.save_on(tier))
            report.compared += 1
            if same(expected, found):
                continue
            if kept_what_was_overwritten(call, mode, expected, found):
                continue
            if operator.name in UNSTEADY:
                report.unrepeatable += 1
            else:
                report.failures.append(f"{what}, {tier}, {mode.name}: {found!s:.200}")
    call = Sample(operator.op, sample)
    leaked = left_over(call)
    for tier in TIERS:
        if left_over(call, lambda tier=tier: belady.save_on(tier)) > leaked:
            report.failures.append(f"{what}, {tier}: abandoned forward leaks")


def recurrent(x: Tensor, *weights: Tensor) -> Tensor:
    state = x.new_zeros(1, x.shape[0], 6)
    return torch.lstm(x, (state, state), weights, True, 1, 0.0, True, False, True)[0]


def recurrent_sample(device: str, transposed: bool) -> SimpleNamespace:
    """A sample as the database would hold it, had it recurrent layers."""
    torch.manual_seed(0)
    shapes = [(24, 5), (24, 6), (24,), (24,)]
    weights = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    x = torch.randn(4, 3, 5, device=device)
    x = x.transpose(0, 1) if transposed else x
    return SimpleNamespace(
        input=x.requires_grad_(), args=weights, kwargs={}, output_process_fn_grad=lambda out: out
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_recurrent_layer(transposed: bool, device: str) -> None:
    operator = SimpleNamespace(
        name="lstm",
        op=recurrent,
        supports_gradgrad=False,
        inplace_variant=None,
        supports_inplace_autograd=False,
    )
    report = Report()
    check_sample(operator, device, recurrent_sample(device, transposed), "lstm", report)
    assert report.failures == []
    assert report.compared > 0


def check(operator: Any, device: str, limit: int) -> Report:
    report = Report()
    for dtype in dtypes(operator, device):
        for number, sample in enumerate(samples(operator, device, dtype, limit)):
            check_sample(operator, device, sample, f"{dtype} sample {number}", report)
    return report


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.timeout(1800)
def test_operator(operator: Any, device: str, limit: int) -> None:
    if not dtypes(operator, device):
        pytest.skip(f"cannot be differentiated on {device}")
    with warnings.catch_warnings():
        # What operators say about themselves (deprecated, beta, resized) is not at stake here.
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        report = check(operator, device, limit)
    assert report.failures == []
    assert report.compared > 4 * report.unrepeatable
