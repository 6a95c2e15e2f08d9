"""Attention by ordinary ops, one slice of heads after another, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from belady.errors import SectionError
from belady.sections.slices import Bounds, bounds
from belady.sections.standing import saved

# Queries, keys, values and the mask, if there is one.
Tensors = Sequence[Tensor | None]
# Ordinary ops take them to float32.
HALVES = frozenset({torch.float16, torch.bfloat16})

# Slices at most, as each adds dozens of ops to be planned; and bytes of the matrix in one that keep
# a device busy.
_SLICES, _LEAST_SLICE = 16, 16 << 20
# So many heads are enough not to cut samples too.
_FEW = 8
_CHANGED = (
    "queries, keys, values or a mask were changed in place after scaled_dot_product_attention"
)
_DOUBLE = (
    "scaled_dot_product_attention runs in slices of heads where memory is scarce, and its gradient "
    "has no graph of its own: create_graph=True (a gradient of a gradient) and "
    "is_grads_batched=True need a larger budget, or exact=True"
)


class Options(NamedTuple):
    """How attention is called.

    Attributes
    ----------
    grouped
        Whether several heads may share keys and values.
    """

    causal: bool
    scale: float | None
    grouped: bool

    def attend(self, tensors: Sequence[Any]) -> Tensor:
        """Attention by ordinary ops."""
        query, key, value, mask = tensors
        if mask is not None:
            mask = _added(mask, query.dtype)
        made: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, mask, 0.0, self.causal, scale=self.scale, enable_gqa=self.grouped
        )[0]
        return made


class Slice(NamedTuple):
    """What a slice has of each dimension before the last two: of samples, then of heads."""

    queries: tuple[Bounds, ...]
    keys: tuple[Bounds, ...]

    def parts(self, tensors: Tensors) -> list[Tensor | None]:
        """Views of its part of each tensor."""
        return [
            None if tensor is None else _narrowed(tensor, place)
            for tensor, place in zip(tensors, self.places(tensors), strict=True)
        ]

    def places(self, tensors: Tensors) -> list[_Place]:
        """Where its part of each tensor is."""
        each = zip(tensors, (self.queries, self.keys, self.keys, self.queries), strict=True)
        return [() if tensor is None else _place(tensor, where) for tensor, where in each]


# Dimension, start and size of each narrowing.
_Place = tuple[tuple[int, int, int], ...]


def _place(tensor: Tensor, where: tuple[Bounds, ...]) -> _Place:
    """What has a dimension less, or one of size 1 in it, is the same for all slices of it."""
    leading = tensor.shape[:-2]
    cut = zip(leading, where[len(where) - len(leading) :], strict=True)
    return tuple(
        (dim, it.start, it.size) for dim, (size, it) in enumerate(cut) if size not in (1, it.size)
    )


def _narrowed(tensor: Tensor, place: _Place) -> Tensor:
    for narrowing in place:
        tensor = tensor.narrow(*narrowing)
    return tensor


def slices_of(samples: Sequence[int], heads: int, groups: int, nbytes: int) -> tuple[Slice, ...]:
    """Slices of heads, in order; where heads are few, of samples too.

    How many there are hardly depends on one sample more or one token less: by traces with these it
    is known whether the modules around may be cut as well.

    Parameters
    ----------
    samples
        Sizes of the dimensions before that of heads.
    groups
        Of heads that share keys and values.
    nbytes
        Size of the matrix of one sample.
    """
    # Numbers that double: one sample more than a power of two changes nothing, nor does a token.
    doubled = nbytes << math.prod(samples).bit_length()
    wanted = min(_SLICES, 1 << (-(-doubled // _LEAST_SLICE) - 1).bit_length())
    each, slices = heads // groups, min(heads, wanted)
    if slices <= groups:
        found = [(Bounds(it.start * each, it.size * each), it) for it in bounds(groups, slices)]
    else:
        found = [
            (Bounds(at * each + it.start, it.size), Bounds(at, 1))
            for at in range(groups)
            for it in bounds(each, slices // groups)
        ]
    left, before = wanted // len(found) if heads < _FEW else 1, []
    for count in reversed(samples):
        before.append(bounds(count, min(count, left)))
        left //= len(before[-1])
    return tuple(
        Slice((*where, queries), (*where, keys))
        for where in product(*reversed(before))
        for queries, keys in found
    )


def attend(options: Options, cut: tuple[Slice, ...], tensors: Sequence[Tensor | None]) -> Tensor:
    """Attention in slices, with a gradient that is made in slices too."""
    made: Tensor = _InSlices.apply(options, cut, *tensors)  # type: ignore[no-untyped-call]
    return made


class _InSlices(torch.autograd.Function):
    """Attention as one node of autograd's graph, which saves what it is given alone."""

    @staticmethod
    def forward(
        ctx: Any, options: Options, cut: tuple[Slice, ...], query: Tensor, *others: Tensor | None
    ) -> Tensor:
        tensors = (query, *others)
        ctx.options, ctx.cut = options, cut
        ctx.save_for_backward(*tensors)
        with torch.autocast(query.device.type, enabled=False):
            made = [options.attend(where.parts(tensors)) for where in cut]
        return _joined(made, [where.places(tensors)[0] for where in cut])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(gradient):
            raise SectionError(_DOUBLE)
        options, cut, tensors = ctx.options, ctx.cut, saved(ctx, _CHANGED, "query")
        places = [where.places(tensors) for where in cut]
        needed = {at for at, needs in enumerate(ctx.needs_input_grad[2:]) if needs}
        totals = {at: _Total(tensors[at], [it[at] for it in places]) for at in needed}
        with torch.autocast(gradient.device.type, enabled=False):
            for where, place in zip(cut, places, strict=True):
                part = _narrowed(gradient, place[0])
                _add_slice(totals, place, _gradients(options, where.parts(tensors), part, needed))
        return None, None, *(totals[at].whole() if at in totals else None for at in range(4))


def _add_slice(totals: dict[int, _Total], place: list[_Place], parts: dict[int, Tensor]) -> None:
    for at, part in parts.items():
        totals[at].add(place[at], part)


def _gradients(
    options: Options, parts: Sequence[Any], gradient: Tensor, needed: set[int]
) -> dict[int, Tensor]:
    """Of those parts that need one, as precise as sums are, by the ops that autograd runs.

    Asked for it, autograd would make nodes in backward, which whoever watches it does not know.
    That of the mask is not summed up yet where it is broadcast.
    """
    given, mask = parts[:3], parts[3]
    dtype: torch.dtype = given[0].dtype
    if dtype in HALVES and not torch._C._get_math_sdp_allow_fp16_bf16_reduction():
        dtype = torch.float32
    query, key, value, gradient = (it.to(dtype) for it in (*given, gradient))
    groups, each = key.shape[-3], query.shape[-3] // key.shape[-3]
    scale = 1 / math.sqrt(query.shape[-1]) if options.scale is None else options.scale
    # Of queries and of keys.
    factors = math.copysign(math.sqrt(abs(scale)), scale), math.sqrt(abs(scale))
    query = query * factors[0]
    key, value = (it.repeat_interleave(each, -3) if each > 1 else it for it in (key, value))
    turned = key.mT * factors[1]
    weights = torch.ops.aten._safe_softmax(_scores(options, query, turned, mask), -1)
    found = {}
    if 2 in needed:
        found[2] = _of_groups(weights.mT @ gradient, groups)
    if needed - {2}:
        found[3] = torch._softmax_backward_data(gradient @ value.mT, weights, -1, dtype)
    del weights
    if 1 in needed:
        found[1] = _of_groups((query.mT @ found[3] * factors[1]).mT, groups)
    if 0 in needed:
        found[0] = found[3] @ turned.mT * factors[0]
    return {at: found[at] for at in needed}


def _of_groups(gradient: Tensor, groups: int) -> Tensor:
    """Summed up over the heads of each group."""
    if gradient.shape[-3] == groups:
        return gradient
    return torch.unflatten(gradient, -3, (groups, -1)).sum(-3)


def _scores(options: Options, query: Tensor, turned: Tensor, mask: Tensor | None) -> Tensor:
    scores = query @ turned
    if options.causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_()
    return scores if mask is None else scores.add_(_added(mask, scores.dtype))


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores: nothing where a mask is true, and else minus infinity."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


class _Total:
    """The gradient of a whole tensor.

    Parameters
    ----------
    places
        Of all slices; those that share a part add up there.
    """

    def __init__(self, tensor: Tensor, places: Sequence[_Place]) -> None:
        self._parts: dict[_Place, Tensor] = {}
        self._shape, self._dtype = tensor.shape, tensor.dtype
        # Where several add up, they are rounded once, and not slice by slice.
        shared = len(set(places)) < len(places) and tensor.dtype in HALVES
        self._wide = torch.float32 if shared else tensor.dtype

    def add(self, place: _Place, part: Tensor) -> None:
        """Add the gradient of a slice, summed up where the tensor is broadcast."""
        sizes = {dim: size for dim, _, size in place}
        own = [sizes.get(dim, whole) for dim, whole in enumerate(self._shape)]
        part = part.sum_to_size(own).to(self._wide)
        if place in self._parts:
            part = self._parts[place] + part
        self._parts[place] = part

    def whole(self) -> Tensor:
        """Put all slices together, once."""
        places, parts = list(self._parts), list(self._parts.values())
        self._parts.clear()
        return _joined(parts, places).to(self._dtype)


def _joined(parts: list[Tensor], places: Sequence[_Place]) -> Tensor:
    """Parts in their order, put together from the last dimension that is cut to the first."""
    for dim in sorted({dim for place in places for dim, _, _ in place}, reverse=True):
        count = len({narrowing for place in places for narrowing in place if narrowing[0] == dim})
        parts = [torch.cat(parts[at : at + count], dim) for at in range(0, len(parts), count)]
    return parts[0]
