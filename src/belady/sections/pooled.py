"""BatchNorm in training mode over slices in a captured graph: ops that autograd can follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from belady.sections.batchnorm import moments


@dataclass(frozen=True)
class Pooled:
    """Statistics of all slices, and how gradients come to them.

    A slice is normalised by one op that saves the slice alone, and takes statistics for constants:
    ``(x - mean) * inverse``. What it takes for weight and bias has the values of the module's, and
    depends on the statistics: their gradients, which the op sums over all samples anyway, are what
    those of the statistics are made of.
    """

    mean: Tensor
    variance: Tensor
    weight: Tensor
    bias: Tensor
    eps: float

    def normalised(self, part: Tensor) -> Tensor:
        """Normalise a slice."""
        given = self.mean, self.variance, self.weight, self.bias
        return F.batch_norm(part, *given, training=False, momentum=0.0, eps=self.eps)


def pooled(module: Any, parts: Sequence[Tensor]) -> Pooled:
    """Take the statistics of slices, of which the first ones are the larger, for a batch norm.

    The running ones are updated once.

    Raises
    ------
    ValueError
        What the module raises on such input.
    """
    counts = [part.numel() // part.shape[1] for part in parts]
    total = sum(counts)
    if total == 1:
        raise ValueError(
            "Expected more than 1 value per channel when training, got input size "
            f"{parts[0].size()}"
        )
    means, variances = [], []
    for part in parts:
        module._check_input_dim(part)
        variance, mean = moments(part)
        means.append(mean)
        variances.append(variance)
    stacked = torch.stack(means)
    mean = _weighted(stacked, counts)
    variance = _weighted(torch.stack(variances) + (stacked - mean).square(), counts)
    _update_running(module, mean.detach(), variance.detach() * (total / (total - 1)))
    inverse = torch.rsqrt(variance + module.eps)
    weight, bias = inverse / inverse.detach(), (mean.detach() - mean) * inverse
    if module.weight is not None:
        weight, bias = weight * module.weight, bias * module.weight
    if module.bias is not None:
        bias = bias + module.bias
    return Pooled(mean.detach(), variance.detach(), weight, bias, module.eps)


def _weighted(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Mean of rows, one for each slice, by how many values the slice has."""
    total, least = sum(counts), counts[-1]
    larger = sum(count > least for count in counts)
    result = rows[larger:].sum(0) * (least / total)
    if larger:
        result = result + rows[:larger].sum(0) * (counts[0] / total)
    return result


def _update_running(module: Any, mean: Tensor, variance: Tensor) -> None:
    if not (module.training and module.track_running_stats):
        return
    factor: Any = module.momentum or 0.0
    with torch.no_grad():
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
            if module.momentum is None:
                factor = 1.0 / module.num_batches_tracked.to(mean.dtype)
        for running, now in ((module.running_mean, mean), (module.running_var, variance)):
            if running is not None:
                running.copy_(running * (1 - factor) + now * factor)
