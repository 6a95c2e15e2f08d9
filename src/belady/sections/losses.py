"""Cross-entropy of many classes in slices of rows, with the same bits, wherever it is called.

Plain PyTorch holds the logarithms of all probabilities from forward on, and in backward their
gradient and that of the logits beside them: for a language model often more than everything else.
Its kernels work out each row alone, so slices of rows have the same bits; the sum over rows is left
to the kernel that makes it in plain PyTorch.
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
        plain = self._below = _in_use(F.cross_entropy)
        # Whoever forgets to close what owns this leaves a function that only passes calls on.
        owner = weakref.ref(self)

        @functools.wraps(plain)
        def cross_entropy(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            losses = None if torch.compiler.is_compiling() else owner()
            try:
                call = _call(plain, *args, **kwargs)
            except TypeError:  # the plain one says what is wrong
                call = None
            if losses is None or call is None or not losses._takes(input, target, call):
                return plain(input, target, *args, **kwargs)
            losses.largest_bytes = max(losses.largest_bytes, _logarithms_bytes(input))
            loss: Tensor = _Rows.apply(input, target, call)  # type: ignore[no-untyped-call]
            return loss

        _STANDING[cross_entropy] = owner, plain
        self._function = F.cross_entropy = cross_entropy

    def detach(self) -> None:
        """Give the place back; where another stands on it, only pass calls on from now on."""
        function, self._function = self._function, None
        if function is not None and F.cross_entropy is function:
            F.cross_entropy = _in_use(self._below)

    def stands(self, function: Callable[..., Tensor]) -> bool:
        """Whether ``function`` is what stands in the place for this one."""
        return self._function is function

    def _takes(self, logits: Tensor, target: Tensor, call: _Call) -> bool:
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
            and not _is_traced()
            and forward_ad._current_level < 0
            and _are_classes(target, logits.shape[1], call.ignored)
        )


# Whose each function that ever stood in the place is, and what was there before it.
_STANDING: weakref.WeakKeyDictionary[
    Callable[..., Tensor], tuple[weakref.ref[Losses], Callable[..., Tensor]]
] = weakref.WeakKeyDictionary()


def _in_use(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function``, or what it passes calls on to if it is nobody's any more."""
    while function in _STANDING:
        owner, below = _STANDING[function]
        losses = owner()
        if losses is not None and losses.stands(function):
            break
        function = below
    return function


def _is_traced() -> bool:
    """Whether ops are written down for a graph, which is to have the plain one in it."""
    proxies = torch._C._TorchDispatchModeKey.PROXY
    tracing = torch._C._get_tracing_state() is not None
    return tracing or torch._C._get_dispatch_mode(proxies) is not None


class _Call(NamedTuple):
    """A call of ``plain`` with its options."""

    plain: Callable[..., Tensor]
    ignored: int
    reduction: str

    def of_rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """The loss of each row."""
        return self.plain(logits, target, ignore_index=self.ignored, reduction="none")

    def whole(self, logits: Tensor, target: Tensor) -> Tensor:
        """What plain PyTorch gives."""
        return self.plain(logits, target, ignore_index=self.ignored, reduction=self.reduction)


def _call(
    plain: Callable[..., Tensor],
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> _Call | None:
    """A call with these arguments, or None for what is left to plain PyTorch."""
    rare = (weight, size_average, reduce)
    if any(it is not None for it in rare) or label_smoothing or reduction not in _REDUCTIONS:
        return None
    return _Call(plain, ignore_index, reduction)


def _logarithms_bytes(logits: Tensor) -> int:
    """Of the logarithms as the sum over rows reads them: autocast has it in float32."""
    autocast = torch.is_autocast_enabled(logits.device.type)
    return logits.numel() * (max(4, logits.itemsize) if autocast else logits.itemsize)


def _are_classes(target: Tensor, classes: int, ignored: int) -> bool:
    """Whether plain PyTorch takes the targets; a CUDA kernel of either says it later."""
    if target.device.type != "cpu" or isinstance(target, FakeTensor):
        return True
    return bool((((target >= 0) & (target < classes)) | (target == ignored)).all())


def _slices(logits: Tensor) -> Iterator[slice]:
    rows, nbytes = len(logits), logits.nbytes
    part = max(nbytes // _PARTS, _LEAST_SLICE)
    step = max(_ROWS, int(rows * part / nbytes) // _ROWS * _ROWS)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


class _Rows(torch.autograd.Function):
    """One node of autograd's graph; it saves the logits alone."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, call: _Call) -> Tensor:
        losses = [call.of_rows(logits[part], target[part]) for part in _slices(logits)]
        # The kernel that sums up finds the loss of each row where it finds that of one class.
        only = torch.where(target == call.ignored, _IGNORED, 0)
        of_class = torch.cat(losses).neg_().unsqueeze(1)
        reduction = _REDUCTIONS[call.reduction]
        loss, total = torch.ops.aten.nll_loss_forward(of_class, only, None, reduction, _IGNORED)
        ctx.save_for_backward(logits, target, total)
        kind = logits.device.type
        ctx.call, ctx.kind, ctx.dtype = call, kind, torch.get_autocast_dtype(kind)
        ctx.autocast = torch.is_autocast_enabled(kind)
        made: Tensor = loss
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        logits, target, total = _saved(ctx)
        call: _Call = ctx.call
        with torch.autocast(ctx.kind, ctx.dtype, enabled=ctx.autocast):
            if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(gradient):
                return *_of_whole(call, logits, target, gradient), None, None
            # What a mean's gradient is in the kernel of plain PyTorch.
            each = (gradient / total if call.reduction == "mean" else gradient).expand(len(logits))
            made = torch.empty_like(logits, memory_format=torch.contiguous_format)
            for part in _slices(logits):
                made[part] = _gradient(call, logits[part].detach(), target[part], each[part])
        return made, None, None


def _of_whole(call: _Call, logits: Tensor, target: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """For a gradient that is to have a graph of its own, and for several at once."""
    graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Of a view: hooks on the logits themselves are run by who asks for their gradient.
        seen = logits.view_as(logits) if graph else logits.detach().requires_grad_()
        loss = call.whole(seen, target)
    return torch.autograd.grad(loss, seen, gradient, create_graph=graph)


def _gradient(call: _Call, logits: Tensor, target: Tensor, each: Tensor) -> Tensor:
    with torch.enable_grad():
        losses = call.of_rows(logits.requires_grad_(), target)
    return torch.autograd.grad(losses, logits, each)[0]


def _saved(ctx: Any) -> tuple[Tensor, ...]:
    try:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise SectionError(
            "logits or targets were changed in place after cross_entropy, whose backward needs "
            f"them where memory is scarce: change a copy, as in logits.clone() ({error})"
        ) from None
    return saved
