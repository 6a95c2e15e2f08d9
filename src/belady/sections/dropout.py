"""Dropout in slices: its random numbers are those of the whole batch, drawn once.

The first slice that comes to a dropout draws for all samples, by the ops that the whole batch would
draw by; calls keep their order. So results are those of the whole batch, and so is the generator
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from belady.errors import SectionError
from belady.sections.slices import Bounds, beside, elements_apart, empty_like


def draws_for_all(module: Any) -> bool:
    """Whether a module is a dropout that can draw for all samples at once."""
    return type(module) is nn.Dropout and not module.inplace


class Drawing:
    """What the dropouts of a stretch draw in one call of it.

    Parameters
    ----------
    name
        Of the stretch, for messages.
    cut
        The slices.
    along
        The dimension that is cut.
    """

    def __init__(self, name: str, cut: tuple[Bounds, ...], along: int) -> None:
        self._name = name
        self._cut = cut
        self._along = along
        self._index = 0
        self._next = 0
        self._drawn: list[Tensor | None] = []
        self._hooks = _saving_hooks()

    def forwards(self, modules: Iterable[nn.Module]) -> dict[nn.Module, Callable[[Tensor], Tensor]]:
        """What dropouts among ``modules`` do in the place of their forward."""
        return {
            module: partial(self._drop, module.p)
            for module in modules
            if isinstance(module, nn.Dropout) and module.training and 0 < module.p < 1
        }

    def begin(self, index: int) -> None:
        """Slice ``index`` begins a stage."""
        self._index, self._next = index, 0
        if not index:
            self._drawn = []

    def end(self) -> None:
        """Raise if the slice has met fewer dropouts than the first.

        Raises
        ------
        SectionError
            Later slices would use other numbers than the whole batch.
        """
        if self._next != len(self._drawn):
            self._refuse("is not called equally often in every slice")

    def _drop(self, p: float, input: Tensor) -> Tensor:
        where, along = self._cut[self._index], self._along
        if not torch.is_grad_enabled() or _saving_hooks() != self._hooks:
            self._refuse("is called without grad or in a checkpoint, which would draw anew")
        if not self._is_in_order(input):
            self._refuse("is given samples that do not lie dense and one after another")
        if not self._index:
            self._drawn.append(drawn(empty_like(input, self._samples, along), p))
        found = self._drawn[self._next] if self._next < len(self._drawn) else None
        if found is None or beside(found, along) != beside(input, along):
            self._refuse("is not called alike in every slice")
        if self._index + 1 == len(self._cut):
            self._drawn[self._next] = None
        self._next += 1
        part = found.narrow(along, where.start, where.size)
        if part.dtype is torch.bool:
            result: Tensor = _Masked.apply(input, part, 1 / (1 - p))  # type: ignore[no-untyped-call]
            return result
        return input * part

    def _is_in_order(self, input: Tensor) -> bool:
        """Whether numbers drawn for all would be given out to slices like this one in order."""
        along, size = self._along, self._cut[self._index].size
        if input.dim() <= along or input.shape[along] != size:
            return False
        return input.is_contiguous() if along else input.stride(0) == elements_apart(input)

    @property
    def _samples(self) -> int:
        return self._cut[-1].start + self._cut[-1].size

    def _refuse(self, reason: str) -> NoReturn:
        raise SectionError(f"{self._name} cannot run in slices: a Dropout {reason}")


def drawn(like: Tensor, p: float) -> Tensor:
    """What a dropout draws for a tensor like this one, which is overwritten.

    Its factors on a CPU, on other devices where it keeps an element: as `torch.dropout` does it.
    """
    if like.device.type == "cpu":
        factors: Tensor = torch.ops.aten.div_.Scalar(like.bernoulli_(1 - p), 1 - p)
        return factors
    # Which number an element gets depends on size and layout of all, so scratch of that size is
    # needed; what it holds does not matter.
    return torch.native_dropout(like, p, True)[1]


class _Masked(torch.autograd.Function):
    """Dropout by a mask that is there, with the rounding of the op's own gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return _masked(input, mask, scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return _masked(gradient, mask, ctx.scale), None, None


def _masked(tensor: Tensor, mask: Tensor, scale: float) -> Tensor:
    result: Tensor = torch.ops.aten.native_dropout_backward.default(tensor, mask, scale)
    return result


def _saving_hooks() -> Any:
    """Who is asked next about saved tensors."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
