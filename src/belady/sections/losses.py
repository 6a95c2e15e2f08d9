"""Cross-entropy of many classes in slices of rows, with the same bits, wherever it is called.

Plain PyTorch holds the logarithms of all probabilities from forward on, and in backward their
gradient and that of the logits beside them: for a language model often more than everything else.
Its kernels work out each row alone, so slices of rows have the same bits; the sum over rows is left
to the kernel that makes it in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from belady.ir.hardware import HardwareProfile
from belady.ir.trace import Trace
from belady.measure.held import missing_state
from belady.measure.stages import Policy
from belady.planners import smallest_budget, traits_of
from belady.sections.logarithms import casts_logarithms, is_torchs
from belady.sections.standing import Function, Standing, is_ordinary, saved
from belady.units import format_bytes

# The part of the budget from which on the logarithms of a loss matter, or a matrix of attention.
MATTERS = 64
# What a loss holds at its peak, in bytes of half-precision outputs: the logarithms, their gradient
# and that of the outputs, each in float32; and the logarithms of that.
_OF_OUTPUTS, _LOGARITHMS = 6, 2
_SAID = (
    "cross_entropy runs in slices of rows, since all of its logarithms ({}) would be held from "
    "forward on, and twice in backward: results are the same"
)

# Numbers of `at::Reduction`.
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
_HALVES = frozenset({torch.float16, torch.bfloat16})
_FLOATS = _HALVES | {torch.float32, torch.float64}
# Kernels read a row from where its bytes are aligned to 16 on: a slice begins so many rows after
# the whole does that its rows are aligned as they were.
_ROWS = 16
# A slice of the logarithms is a part of all, but not less than what keeps a device busy.
_PARTS, _LEAST_SLICE = 32, 16 << 20
_IGNORED = -100
_CHANGED = "logits or targets were changed in place after cross_entropy"


def all_fits(trace: Trace, hardware: HardwareProfile, policy: Policy, output_bytes: int) -> bool:
    """Whether nothing need be done: all can be kept, beside what is still to come.

    That is Adam's state, and a loss in float32 of ``output_bytes`` that the model gives.
    """
    needed = smallest_budget("baseline", trace, hardware, policy.budget)
    beside = missing_state(trace, 2) + _OF_OUTPUTS * output_bytes
    return needed + beside <= policy.budget.device_bytes


class Losses(Standing):
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
        super().__init__("cross_entropy")
        self.largest_bytes = 0
        self._device = device
        self._least_bytes = least_bytes

    def attach_for(
        self, trace: Trace, hardware: HardwareProfile, policy: Policy, output_bytes: int
    ) -> None:
        """Take the place if a loss of what a model gives may lack room beside ``trace``."""
        if self.is_attached or not traits_of(policy.name).slices_losses:
            return
        matters = _LOGARITHMS * output_bytes >= self._least_bytes
        if matters and not all_fits(trace, hardware, policy, output_bytes):
            self.attach()

    @property
    def said(self) -> list[str]:
        """What a user should know of it, one sentence each."""
        return [_SAID.format(format_bytes(self.largest_bytes))] if self.largest_bytes else []

    def call(self, plain: Function, *args: Any, **kwargs: Any) -> Tensor:
        """The loss, in slices where that is worth it."""
        try:
            logits, target, call = _called(plain, *args, **kwargs)
        except TypeError:  # the plain one says what is wrong
            return plain(*args, **kwargs)
        if call is None or not self._takes(logits, target, call):
            return plain(*args, **kwargs)
        self.largest_bytes = max(self.largest_bytes, _logarithms_bytes(logits))
        loss: Tensor = _Rows.apply(logits, target, call.on(logits))  # type: ignore[no-untyped-call]
        return loss

    def _takes(self, logits: Tensor, target: Tensor, call: _Call) -> bool:
        return (
            is_ordinary(logits, target)
            and logits.device.type == target.device.type == self._device.type
            and logits.dtype in _FLOATS
            and target.dtype is torch.int64
            and logits.dim() == 2
            and tuple(target.shape) == (logits.shape[0],)
            and logits.requires_grad
            and torch.is_grad_enabled()
            and _logarithms_bytes(logits) >= self._least_bytes
            and _are_classes(target, logits.shape[1], call.ignored)
        )


class _Call(NamedTuple):
    """A call of ``plain`` with its options.

    Attributes
    ----------
    casts
        Whether autocast makes all logarithms float32, rather than the logits.
    known
        Whether ``plain`` is PyTorch's, and takes the logarithms of the logits as they are.
    """

    plain: Function
    ignored: int
    reduction: str
    casts: bool = False
    known: bool = False

    def on(self, logits: Tensor) -> _Call:
        """The call, and what it does with such logits: asked once, and not for each slice."""
        kind, torchs = logits.device.type, is_torchs(self.plain)
        half = torch.is_autocast_enabled(kind) and logits.dtype in _HALVES
        casts = (
            half
            and torchs
            and casts_logarithms(
                self.plain, logits.device, logits.dtype, torch.get_autocast_dtype(kind)
            )
        )
        return self._replace(casts=casts, known=torchs and (casts or not half))

    def of_rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """The loss of each row.

        Where autocast makes all logarithms float32, and one of each row is picked then, that one
        is made float32 here.
        """
        options = {"ignore_index": self.ignored, "reduction": "none"}
        if not self.casts:
            return self.plain(logits, target, **options)
        with torch.autocast(logits.device.type, enabled=False):
            return self.plain(logits, target, **options).float()

    def gradient_to(self, out: Tensor, logits: Tensor, target: Tensor, each: Tensor) -> None:
        """Write the logits' gradient, ``each`` being that of the loss of each row.

        Where it is known what PyTorch calls, this calls it: autograd takes the host longer, and
        makes the gradient elsewhere first.
        """
        if not self.known:
            with torch.enable_grad():
                losses = self.of_rows(logits.requires_grad_(), target)
            out.copy_(torch.autograd.grad(losses, logits, each)[0])
            return
        # By their own names autocast leaves them alone.
        aten, unread = torch.ops.aten, logits.new_empty(())
        known = aten._log_softmax(logits, 1, False)
        chosen = each.to(known.dtype)
        chosen = aten.nll_loss_backward(chosen, known, target, None, 0, self.ignored, unread)
        aten._log_softmax_backward_data(chosen, known, 1, logits.dtype, out=out)

    def whole(self, logits: Tensor, target: Tensor) -> Tensor:
        """What plain PyTorch gives."""
        return self.plain(logits, target, ignore_index=self.ignored, reduction=self.reduction)


def _called(
    plain: Function, input: Tensor, target: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor, _Call | None]:
    """Logits, targets and what to do with them."""
    return input, target, _call(plain, *args, **kwargs)


def _call(
    plain: Function,
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
        logits, target, total = saved(ctx, _CHANGED, "logits")
        call: _Call = ctx.call
        with torch.autocast(ctx.kind, ctx.dtype, enabled=ctx.autocast):
            if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(gradient):
                return *_of_whole(call, logits, target, gradient), None, None
            # What a mean's gradient is in the kernel of plain PyTorch.
            each = (gradient / total if call.reduction == "mean" else gradient).expand(len(logits))
            made = torch.empty_like(logits, memory_format=torch.contiguous_format)
            for part in _slices(logits):
                call.gradient_to(made[part], logits[part].detach(), target[part], each[part])
        return made, None, None


def _of_whole(call: _Call, logits: Tensor, target: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """For a gradient that is to have a graph of its own, and for several at once."""
    graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Of a view: hooks on the logits themselves are run by who asks for their gradient.
        seen = logits.view_as(logits) if graph else logits.detach().requires_grad_()
        loss = call.whole(seen, target)
    return torch.autograd.grad(loss, seen, gradient, create_graph=graph)
