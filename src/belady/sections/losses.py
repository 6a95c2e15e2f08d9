"""Cross-entropy of many classes in slices of rows, with the same bits, wherever it is called.

Plain PyTorch holds the logarithms of all probabilities from forward on, and their gradient and that
of the logits in backward, all in float32 under autocast: for a language model often more than
everything else. Each row is worked out alone by the kernels that are used here, so slices of rows
have the same bits (sums over rows are left to the kernel that takes them in plain PyTorch).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from belady.errors import SectionError

# Numbers of `at::Reduction`.
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
_HALVES = frozenset({torch.float16, torch.bfloat16})
_FLOATS = _HALVES | {torch.float32, torch.float64}
# Not those of AOTAutograd, which a compiler that plans memory itself has asked for.
_TENSORS = (Tensor, torch.nn.Parameter, FakeTensor)
# Kernels read a row from where its bytes are aligned to 16 on: a slice begins so many rows after
# the whole does that its rows are aligned as they were.
_ROWS = 16
# A slice of the logarithms is a part of all, but not less than what keeps a device busy.
_PARTS, _LEAST_SLICE = 32, 16 << 20
_IGNORED = -100
_aten = torch.ops.aten


class Losses:
    """Stands in the place of `torch.nn.functional.cross_entropy`.

    Parameters
    ----------
    device
        Of the logits that it takes care of.
    least_bytes
        Size in bytes of all logarithms from which on they are made in slices.

    Attributes
    ----------
    largest_bytes
        Of all logarithms that were made in slices so far.
    """

    def __init__(self, device: torch.device, least_bytes: int) -> None:
        self.largest_bytes = 0
        self._device = device
        self._least_bytes = least_bytes
        self._function: Callable[..., Tensor] | None = None
        self._below: Callable[..., Tensor] = F.cross_entropy

    def attach(self) -> None:
        """Take the place, once."""
        if self._function is not None:
            return
        plain = self._below = F.cross_entropy
        # Whoever forgets to close what owns this leaves a function that only passes calls on.
        owner = weakref.ref(self)

        @functools.wraps(plain)
        def cross_entropy(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            losses = None if torch.compiler.is_compiling() else owner()
            options = _options(*args, **kwargs)
            if losses is None or options is None or not losses._takes(input, target, options):
                return plain(input, target, *args, **kwargs)
            losses.largest_bytes = max(losses.largest_bytes, _logarithms_bytes(input))

            def again(logits: Tensor, target: Tensor) -> Tensor:
                return plain(logits, target, *args, **kwargs)

            loss: Tensor = _Rows.apply(input, target, options, again)  # type: ignore[no-untyped-call]
            return loss

        self._function = F.cross_entropy = cross_entropy

    def detach(self) -> None:
        """Give the place back; where another stands on it, only pass calls on from now on."""
        function, self._function = self._function, None
        if function is not None and F.cross_entropy is function:
            F.cross_entropy = self._below

    def _takes(self, logits: Tensor, target: Tensor, options: _Options) -> bool:
        return (
            self._function is not None
            and type(logits) in _TENSORS
            and type(target) in _TENSORS
            and logits.device.type == target.device.type == self._device.type
            and logits.dtype in _FLOATS
            and target.dtype is torch.int64
            and logits.dim() == 2
            and tuple(target.shape) == (logits.shape[0],)
            and logits.requires_grad
            and torch.is_grad_enabled()
            and _logarithms_bytes(logits) >= self._least_bytes
            and not torch._C._are_functorch_transforms_active()
            and forward_ad._current_level < 0
            and _are_classes(target, logits.shape[1], options.ignore_index)
        )


class _Options(NamedTuple):
    ignore_index: int
    reduction: int


def _options(
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> _Options | None:
    """The arguments of a call, or None for what is left to plain PyTorch."""
    rare = (weight, size_average, reduce)
    if any(it is not None for it in rare) or label_smoothing or reduction not in _REDUCTIONS:
        return None
    return _Options(ignore_index, _REDUCTIONS[reduction])


def _precise(logits: Tensor) -> torch.dtype:
    """Dtype of the logarithms: autocast has the loss in float32."""
    cast = logits.dtype in _HALVES and torch.is_autocast_enabled(logits.device.type)
    return torch.float32 if cast else logits.dtype


def _logarithms_bytes(logits: Tensor) -> int:
    return logits.numel() * _precise(logits).itemsize


def _are_classes(target: Tensor, classes: int, ignored: int) -> bool:
    """Whether plain PyTorch takes the targets; a CUDA kernel of either says it later."""
    if target.device.type != "cpu" or isinstance(target, FakeTensor):
        return True
    return bool((((target >= 0) & (target < classes)) | (target == ignored)).all())


def _slices(rows: int, nbytes: int) -> Iterator[slice]:
    part = max(nbytes // _PARTS, _LEAST_SLICE)
    step = max(_ROWS, int(rows * part / nbytes) // _ROWS * _ROWS)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


class _Rows(torch.autograd.Function):
    """One node of autograd's graph; it saves the logits alone."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, options: _Options, again: Callable[..., Tensor]
    ) -> Tensor:
        dtype, rows = _precise(logits), len(logits)
        counted = target != options.ignore_index
        places = torch.where(counted, target, 0).unsqueeze(1)
        chosen = logits.new_empty((rows, 1), dtype=dtype)
        for part in _slices(rows, _logarithms_bytes(logits)):
            logarithms = _aten._log_softmax(logits[part].to(dtype), 1, False)
            torch.gather(logarithms, 1, places[part], out=chosen[part])
            del logarithms
        # One class is left, and each row that counts is of it.
        only = torch.where(counted, 0, _IGNORED)
        loss, total = _aten.nll_loss_forward(chosen, only, None, options.reduction, _IGNORED)
        ctx.save_for_backward(logits, target, total)
        ctx.options, ctx.dtype, ctx.again = options, dtype, again
        made: Tensor = loss
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        logits, target, total = _saved(ctx)
        if torch.is_grad_enabled():
            # A gradient that is to have a graph of its own.
            loss = ctx.again(logits.to(ctx.dtype), target)
            found = torch.autograd.grad(loss, logits, gradient, create_graph=True)
            return *found, None, None, None
        made = torch.empty_like(logits, memory_format=torch.contiguous_format)
        ignored, reduction = ctx.options
        for part in _slices(len(logits), logits.numel() * ctx.dtype.itemsize):
            logarithms = _aten._log_softmax(logits[part].to(ctx.dtype), 1, False)
            slope = _aten.nll_loss_backward(
                gradient if gradient.dim() == 0 else gradient[part],
                logarithms,
                target[part],
                None,
                reduction,
                ignored,
                total,
            )
            made[part] = _aten._log_softmax_backward_data(slope, logarithms, 1, ctx.dtype)
            del logarithms, slope
        return made, None, None, None


def _saved(ctx: Any) -> tuple[Tensor, ...]:
    try:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise SectionError(
            "the logits were changed in place after cross_entropy, whose backward needs them where "
            f"memory is scarce: change a copy of them, logits.clone() ({error})"
        ) from None
    return saved
