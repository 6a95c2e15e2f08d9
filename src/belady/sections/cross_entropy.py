"""`belady.cross_entropy`: a linear layer and its cross-entropy, without ever holding all logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from belady.errors import SectionError
from belady.sections.slices import Bounds, bounds

_REDUCTIONS = ("mean", "sum", "none")
# What autocast casts.
_CAST = frozenset({torch.float32, torch.float16, torch.bfloat16})
# A slice of logits in units of ``hidden``: as wide as the middle of an ordinary transformer's MLP.
_WIDTH = 4


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    slices: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross-entropy of ``F.linear(hidden, weight, bias)``, in slices along the classes.

    The logits of a language model are often the largest tensor of an iteration. Here one slice of
    them exists at a time, and backward holds only what it is given and one number for each token.

    Parameters
    ----------
    hidden
        Of shape (..., features): what the last layer gives for each token.
    weight
        Of shape (classes, features), as `torch.nn.Linear` has it.
    targets
        Of shape (...): class indices.
    bias
        Of shape (classes,).
    slices
        How many; at most one for each class. By default so many that a slice of logits has at most
        four times the elements of ``hidden``.
    ignore_index, reduction, label_smoothing
        As for `torch.nn.functional.cross_entropy`.

    Returns
    -------
    Tensor
        A number, or losses in the shape of ``targets`` for ``reduction="none"``. Its dtype is that
        of plain PyTorch: float32 under autocast, that of ``hidden`` without.

    Raises
    ------
    ValueError
        If shapes do not go together, targets are probabilities, or an option is not known.
    RuntimeError
        If a target is no class; on CUDA later, as from plain PyTorch.
    SectionError
        From backward, for a gradient that is to have a graph of its own (``create_graph=True``).

    Notes
    -----
    Backward computes the logits of each slice again: four matrix products where plain PyTorch has
    three. Gradients made in forward would have to be held until backward, that of ``weight`` beside
    its ``.grad``, and would be rounded before the factor of a gradient scaler is known.

    Slices are along the classes, so that each reads its own part of ``weight``, once, and makes its
    own part of the gradient: nothing as large as ``weight`` is summed slice by slice. Sums over
    classes are taken in float32 (float64 for float64). Results differ from plain PyTorch's by the
    order of these sums, and in float16 and bfloat16 by the rounding of logarithms, which plain
    PyTorch does and this does not.

    Examples
    --------
    >>> import torch, belady
    >>> hidden, head = torch.randn(2, 8, 16), torch.nn.Linear(16, 1000)
    >>> targets = torch.randint(1000, (2, 8))
    >>> loss = belady.cross_entropy(hidden, head.weight, targets, head.bias)
    >>> loss.backward()
    """
    _refuse_unfit(hidden, weight, targets, bias)
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(_REDUCTIONS)}, not {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be between 0 and 1, not {label_smoothing!r}")
    classes, features = weight.shape
    if slices is None:
        slices = -(-classes // (_WIDTH * features))
    elif isinstance(slices, bool) or not isinstance(slices, int) or slices < 1:  # type: ignore[redundant-expr]
        raise ValueError(f"slices must be an integer of at least 1, not {slices!r}")
    rows, flat = hidden.reshape(-1, features), targets.reshape(-1)
    counted = flat != ignore_index
    head = _Head(bounds(classes, min(slices, classes)), label_smoothing, _autocast_dtype(hidden))
    found: Tensor = _Losses.apply(head, rows, weight, bias, flat, counted)  # type: ignore[no-untyped-call]
    dtype = hidden.dtype if head.autocast is None else found.dtype
    if reduction == "none":
        return found.view(targets.shape).to(dtype)
    total = found.sum()
    return (total / counted.sum() if reduction == "mean" else total).to(dtype)


@dataclass(frozen=True, slots=True)
class _Head:
    """What one call does with each slice of the classes.

    Attributes
    ----------
    autocast
        Dtype to which autocast casts, or None without it.
    """

    cut: tuple[Bounds, ...]
    smoothing: float
    autocast: torch.dtype | None

    def cast(self, tensor: Tensor) -> Tensor:
        """As autocast casts for a linear layer; but not into its cache, which keeps no graph."""
        eligible = self.autocast is not None and tensor.dtype in _CAST
        return tensor.to(self.autocast) if eligible else tensor

    def matrix(self, weight: Tensor, where: Bounds) -> Tensor:
        """Weights of a slice."""
        return self.cast(weight.narrow(0, where.start, where.size))

    def logits(self, rows: Tensor, matrix: Tensor, bias: Tensor | None, where: Bounds) -> Tensor:
        """Logits of a slice, to be written to."""
        offset = None if bias is None else self.cast(bias.narrow(0, where.start, where.size))
        return _precise(F.linear(rows, matrix, offset))


class _Losses(torch.autograd.Function):
    """The loss of every token, 0 where it does not count."""

    @staticmethod
    def forward(
        ctx: Any,
        head: _Head,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        counted: Tensor,
    ) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            known = (targets >= 0) & (targets < len(weight))
            torch._assert_async(
                (known | ~counted).all(), f"a target is none of {len(weight)} classes"
            )
            rows = head.cast(hidden)
            whole = torch.full_like(targets, float("-inf"), dtype=_precise(rows[:0]).dtype)
            chosen, sums = torch.zeros_like(whole), torch.zeros_like(whole)
            for where in head.cut:
                logits = head.logits(rows, head.matrix(weight, where), bias, where)
                inside, places = _places(targets, where)
                chosen += torch.where(inside, logits.gather(1, places).squeeze(1), 0)
                if head.smoothing:
                    sums += logits.sum(1)
                whole = torch.logaddexp(whole, _consumed(logits))
                del logits
            losses = whole - chosen
            if head.smoothing:
                even = whole - sums / len(weight)
                losses = (1 - head.smoothing) * losses + head.smoothing * even
        ctx.head = head
        ctx.save_for_backward(hidden, weight, bias, targets, counted, whole)
        return torch.where(counted, losses, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise SectionError(
                "belady.cross_entropy makes its gradient slice by slice, without a graph of its "
                "own: create_graph=True (a gradient of a gradient) needs F.linear and "
                "F.cross_entropy instead"
            )
        head: _Head = ctx.head
        hidden, weight, bias, targets, counted, whole = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:4]
        with torch.autocast(hidden.device.type, enabled=False):
            rows = head.cast(hidden)
            factors = torch.where(counted, gradient, 0).unsqueeze(1)
            of_hidden = torch.zeros_like(rows, dtype=whole.dtype) if needs[0] else None
            of_weight = torch.empty_like(weight) if needs[1] else None
            of_bias = torch.empty_like(bias) if needs[2] else None
            for where in head.cut:
                matrix = head.matrix(weight, where)
                slope = head.logits(rows, matrix, bias, where)
                slope.sub_(whole.unsqueeze(1)).exp_()
                if head.smoothing:
                    slope -= head.smoothing / len(weight)
                inside, places = _places(targets, where)
                ones = inside.to(slope.dtype).unsqueeze(1)
                slope.scatter_add_(1, places, ones * (head.smoothing - 1))
                slope = slope.mul_(factors).to(rows.dtype)
                if of_hidden is not None:
                    of_hidden += slope @ matrix
                if of_weight is not None:
                    of_weight.narrow(0, where.start, where.size).copy_(slope.t() @ rows)
                if of_bias is not None:
                    of_bias.narrow(0, where.start, where.size).copy_(slope.sum(0))
                del slope
        if of_hidden is not None:
            of_hidden = of_hidden.to(hidden.dtype)
        return None, of_hidden, of_weight, of_bias, None, None


def _precise(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def _places(targets: Tensor, where: Bounds) -> tuple[Tensor, Tensor]:
    """Which targets are among the classes of a slice, and where: elsewhere any place of it."""
    places = targets - where.start
    inside = (places >= 0) & (places < where.size)
    return inside, torch.where(inside, places, 0).unsqueeze(1)


def _consumed(logits: Tensor) -> Tensor:
    """Logarithms of the sums of exponentials; the logits are overwritten."""
    largest = logits.amax(1)
    # Minus infinity less itself is not a number.
    largest = torch.where(largest.isinf(), 0, largest)
    return logits.sub_(largest.unsqueeze(1)).exp_().sum(1).log_().add_(largest)


def _autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _refuse_unfit(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    shapes = [tuple(tensor.shape) for tensor in (hidden, weight, targets)]
    classes = weight.shape[:1]
    fit = weight.dim() == 2 and shapes[0] == (*shapes[2], shapes[1][1]) and weight.numel()
    if not fit or (bias is not None and bias.shape != classes):
        raise ValueError(
            f"hidden of shape {shapes[0]}, weight of {shapes[1]}, targets of {shapes[2]} and bias "
            f"of {None if bias is None else tuple(bias.shape)} do not go together: "
            "(..., features), (classes, features), (...) and (classes,) do"
        )
    if targets.dtype is not torch.int64:
        raise ValueError(
            f"targets must be class indices of int64, not {targets.dtype}; for probabilities use "
            "F.linear and F.cross_entropy"
        )
