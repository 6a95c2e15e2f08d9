"""BatchNorm in training mode over slices: statistics of the whole batch, then slice by slice.

One implementation for every device, in plain ops (Ioffe and Szegedy, 2015, algorithm 1 and the
gradients of section 3). Sums are taken in float32, in float64 for float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge


def uses_batch_statistics(module: Any) -> bool:
    """Whether a batch norm normalises by the statistics of its input."""
    return bool(module.training or (module.running_mean is None and module.running_var is None))


class BatchNorm:
    """A batch norm that begins a stage.

    Attributes
    ----------
    weight, bias
        Positions in the trainable parameters of the stretch; None where there is none to train.
    """

    KINDS: ClassVar[tuple[type[nn.Module], ...]] = (
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.BatchNorm3d,
    )

    def __init__(self, module: Any, positions: dict[Tensor, int]) -> None:
        self.module = module
        self.weight = positions.get(module.weight) if module.affine else None
        self.bias = positions.get(module.bias) if module.affine else None

    @property
    def trains(self) -> bool:
        """Whether weight or bias needs a gradient."""
        return self.weight is not None or self.bias is not None

    def gradients(self, sums: tuple[Tensor, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Positions and gradients of weight and bias; ``sums`` is what `Normalising.sums` gives."""
        for position, parameter, total in zip(
            (self.weight, self.bias), (self.module.weight, self.module.bias), sums, strict=True
        ):
            if position is not None:
                yield position, total.to(parameter.dtype)

    def open(self, parts: list[Tensor | None]) -> Normalising:
        """Take the statistics of the slices ``parts``, and update the running ones once.

        Raises
        ------
        ValueError
            What the module raises on such input.
        """
        module = self.module
        counts, means, squares = [], [], []
        for part in parts:
            assert part is not None
            module._check_input_dim(part)
            variance, mean = moments(part)
            counts.append(part.numel() // part.shape[1])
            means.append(mean)
            squares.append(variance * counts[-1])
        total = sum(counts)
        if total == 1:
            first = parts[0]
            assert first is not None
            raise ValueError(
                "Expected more than 1 value per channel when training, got input size "
                f"{first.size()}"
            )
        mean, variance = _pooled(counts, means, squares)
        self._update_running(mean, variance * (total / (total - 1)))
        scale = None if module.weight is None else module.weight.detach()
        shift = None if module.bias is None else module.bias.detach()
        return Normalising(mean, torch.rsqrt(variance + module.eps), scale, shift, total, parts)

    def _update_running(self, mean: Tensor, variance: Tensor) -> None:
        module = self.module
        if not (module.training and module.track_running_stats):
            return
        factor = module.momentum or 0.0
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
            if module.momentum is None:
                factor = 1.0 / float(module.num_batches_tracked)
        for running, now in ((module.running_mean, mean), (module.running_var, variance)):
            if running is not None:
                # As torch does it: graphs of other passes that saved it do not notice.
                seen = running.data
                seen.copy_(seen * (1 - factor) + now * factor)


@dataclass(eq=False)
class Normalising:
    """One batch norm in one call of a stretch, from its statistics to the gradient of its input.

    Attributes
    ----------
    mean, inverse
        Of each channel: the mean, and one over the standard deviation.
    scale, shift
        Weight and bias.
    count
        Values of a channel in the batch.
    parts
        The slices, each let go of when it is normalised.
    """

    mean: Tensor
    inverse: Tensor
    scale: Tensor | None
    shift: Tensor | None
    count: int
    parts: list[Tensor | None]

    def enter(self, index: int, token: Tensor | None) -> tuple[GradientEdge | None, Tensor]:
        """Slice ``index``, normalised, and where its gradient will be asked for."""
        part, self.parts[index] = self.parts[index], None
        assert part is not None
        if token is None:
            return None, self.normalised(part, self.scale)
        with torch.enable_grad():
            normalised = _Normalised.apply(token, part, self.scale, self)  # type: ignore[no-untyped-call]
        return get_gradient_edge(normalised), normalised

    def normalised(self, part: Tensor, scale: Tensor | None) -> Tensor:
        """Normalise a slice."""
        result = part - _along_channels(self.mean, part)
        result *= _along_channels(self._factor(scale), part)
        if self.shift is not None:
            result += _along_channels(self.shift, part)
        return result.to(part.dtype)

    def sums(
        self, edges: Iterable[GradientEdge], gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """Gradients of weight and bias, from each slice's edge and gradient."""
        of_gradient = torch.zeros_like(self.mean)
        of_product = torch.zeros_like(self.mean)
        for edge, gradient in zip(edges, gradients, strict=True):
            assert gradient is not None
            of_gradient += _sum(gradient, self.mean.dtype)
            of_product += self._product(edge, gradient)
        return of_product * self.inverse, of_gradient

    def _product(self, edge: GradientEdge, gradient: Tensor) -> Tensor:
        part, _ = _saved(edge)
        centred = part - _along_channels(self.mean, part)
        return _sum(centred.mul_(gradient), centred.dtype)

    def input_gradient(
        self, edge: GradientEdge, gradient: Tensor, sums: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Gradient of a slice of the input; ``sums`` is what `sums` gives."""
        part, scale = _saved(edge)
        of_product, of_gradient = sums
        result = part - _along_channels(self.mean, part)
        result *= _along_channels(of_product * self.inverse / -self.count, part)
        result += gradient
        result -= _along_channels(of_gradient / self.count, part)
        result *= _along_channels(self._factor(scale), part)
        return result.to(part.dtype)

    def _factor(self, scale: Tensor | None) -> Tensor:
        return self.inverse if scale is None else self.inverse * scale


class _Normalised(torch.autograd.Function):
    """Begins the graph of a slice; autograd saves the input and is never asked to go further."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, part: Tensor, scale: Tensor | None, norm: Normalising
    ) -> Tensor:
        # The weight too, so that autograd notices when somebody changes it before backward.
        ctx.save_for_backward(part, scale)
        return norm.normalised(part, scale)


def _saved(edge: GradientEdge) -> tuple[Tensor, Tensor | None]:
    node: Any = edge.node
    part, scale = node.saved_tensors
    return part, scale


def _precise(part: Tensor) -> Tensor:
    return part if part.dtype is torch.float64 else part.float()


def moments(part: Tensor) -> tuple[Tensor, Tensor]:
    """Variance (over all, not one less) and mean of each channel."""
    part = _precise(part)
    if not _takes_scratch(part):
        variance, mean = torch.var_mean(part, _all_but_channels(part), correction=0)
        return variance, mean
    variances, means = torch.var_mean(part, -1, correction=0)
    dims = _all_but_channels(means)
    variance, mean = torch.var_mean(means, dims, correction=0)
    return variance + variances.mean(dims), mean


def _sum(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of each channel."""
    if _takes_scratch(part):
        part = part.sum(-1, dtype=dtype)
    return part.sum(_all_but_channels(part), dtype=dtype)


def _takes_scratch(part: Tensor) -> bool:
    """Whether it is reduced along one dimension first.

    Over all dimensions of a channels_last tensor at once, CUDA's reduction puts partial results in
    scratch memory that can be several times the bytes of the tensor.
    """
    return part.dim() > 2 and not part.is_contiguous()


def _all_but_channels(part: Tensor) -> list[int]:
    return [dim for dim in range(part.dim()) if dim != 1]


def _pooled(counts: list[int], means: list[Tensor], squares: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and variance (over all, not one less) from those of the slices, in their order.

    Centred sums of squares are added to what the slices' means differ by (Chan, Golub and
    LeVeque, 1983): nothing cancels, and no slice is needed a second time.
    """
    total = sum(counts)
    mean = torch.zeros_like(means[0])
    for count, one in zip(counts, means, strict=True):
        mean += one * (count / total)
    centred = torch.zeros_like(mean)
    for count, one, square in zip(counts, means, squares, strict=True):
        centred += square + count * (one - mean) ** 2
    return mean, centred / total


def _along_channels(vector: Tensor, part: Tensor) -> Tensor:
    shape = [1] * part.dim()
    shape[1] = -1
    return vector.view(shape)
