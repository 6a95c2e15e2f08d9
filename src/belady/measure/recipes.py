"""What it takes to run an op again: the operator, its arguments, and which values they were.

Only ops that give the same bits for the same inputs and touch nothing else have a recipe; random
ops never do. Convolutions and matrix products do: torch takes the algorithm of the first run again,
unless its workspace does not fit in memory any more; then the digests tell. Each thread has one of
its own, so convolutions are tried on the thread that replays run on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from belady.measure.clock import Clock, NoClock
from belady.measure.records import draws, tensors_in
from belady.memory.geometry import Geometry, below_autograd, content_of
from belady.memory.thread import in_backward

# Bytes that are compared at once.
_COMPARED = 32 << 20
# A norm over the batch needs no running statistics, and must not update them again.
_BATCH_NORMS = frozenset({"aten.native_batch_norm.default", "aten.cudnn_batch_norm.default"})
# What torch keeps an algorithm of for each thread, on a CUDA device.
_CHOSEN = frozenset({"aten.convolution.default"})
_INPUT, _WEIGHT, _BIAS, _RUNNING, _TRAINING, _EPS = 0, 1, 2, (3, 4), 5, 7

_IN_PLACE = (
    "relu_ silu_ sigmoid_ tanh_ hardtanh_ hardswish_ hardsigmoid_ leaky_relu_ elu_ mish_ "
    "add_.Tensor add_.Scalar mul_.Tensor mul_.Scalar sub_.Tensor div_.Tensor neg_"
)
_FRESH = (
    "relu silu sigmoid tanh gelu hardtanh hardswish hardsigmoid leaky_relu elu mish softplus "
    "threshold add.Tensor add.Scalar sub.Tensor sub.Scalar mul.Tensor mul.Scalar div.Tensor "
    "div.Scalar neg exp log sqrt rsqrt reciprocal abs pow.Tensor_Scalar clamp where.self "
    "masked_fill.Scalar masked_fill.Tensor _to_copy clone cat stack "
    "native_layer_norm native_group_norm _fused_rms_norm "
    "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d upsample_nearest2d "
    "_softmax _log_softmax mean.dim sum.dim_IntList embedding index.Tensor constant_pad_nd roll "
    "convolution mm addmm bmm baddbmm _thnn_fused_lstm_cell _thnn_fused_gru_cell "
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
)


def _names(words: str) -> frozenset[str]:
    return frozenset(f"aten.{w if '.' in w else w + '.default'}" for w in words.split())


# The bits of an elementwise op depend on nothing but its inputs; any other is tried.
IN_PLACE = _names(_IN_PLACE)
REPLAYABLE = _names(_FRESH) | _BATCH_NORMS | IN_PLACE


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument: the value that it showed, and how it lay on the bytes."""

    value: int
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class Recipe:
    """An op to be run again.

    Attributes
    ----------
    args, kwargs
        As they were, with an `Operand` for each tensor.
    outputs
        The value that each tensor of the result showed, in order.
    places
        The positional arguments that are, or hold, tensors.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int, ...] = ()
    places: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tensors = (isinstance(arg, (Operand, list, tuple)) for arg in self.args)
        object.__setattr__(self, "places", tuple(at for at, it in enumerate(tensors) if it))

    def operands(self) -> Iterator[Operand]:
        """Tensor arguments, in order."""
        stack: list[Any] = [self.args, list(self.kwargs.values())]
        while stack:
            item = stack.pop(0)
            if isinstance(item, Operand):
                yield item
            elif isinstance(item, (list, tuple)) and not isinstance(item, Geometry):
                stack[:0] = item

    def run(self, tensor_of: Callable[[Operand], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run the op on the tensors that ``tensor_of`` gives; the tensors of its result."""
        args = list(self.args)
        for place in self.places:
            args[place] = _filled(args[place], tensor_of)
        kwargs = self.kwargs
        if kwargs:
            kwargs = {name: _filled(arg, tensor_of) for name, arg in kwargs.items()}
        with below_autograd(), torch._C._DisableAutocast():
            result = self.func(*args, **kwargs)
        if type(result) is torch.Tensor:
            return (result,)
        return result if _are_tensors(result) else tuple(tensors_in((result,)))


def _are_tensors(result: Any) -> bool:
    return type(result) is tuple and [type(it) for it in result].count(torch.Tensor) == len(result)


def _filled(arg: Any, tensor_of: Callable[[Operand], torch.Tensor]) -> Any:
    """``arg`` with its tensors; by hand, since a tree map takes longer than most kernels."""
    if isinstance(arg, Operand):
        return tensor_of(arg)
    if isinstance(arg, (list, tuple)):
        return [_filled(item, tensor_of) for item in arg]
    return arg


def draft(
    func: Any, args: tuple[Any, ...], kwargs: Any, value_of: Callable[[torch.Tensor], int]
) -> Recipe | None:
    """Recipe of a call that is about to be made, its outputs unknown; None if it has none.

    Parameters
    ----------
    value_of
        Number of the value that a tensor shows; -1 where it is not recorded.
    """
    name = str(func)
    if name not in REPLAYABLE or draws(func, args, kwargs):
        return None
    if any(it.is_nested for it in tensors_in((args, *kwargs.values()))):
        return None
    if name in _BATCH_NORMS:
        if not args[_TRAINING]:
            return None  # running statistics change unseen between forward and backward
        args = tuple(None if place in _RUNNING else arg for place, arg in enumerate(args))

    def operand(tensor: torch.Tensor) -> Operand:
        return Operand(value_of(tensor), Geometry.of(tensor))

    recipe = Recipe(func, *tree_map_only(torch.Tensor, operand, (args, kwargs)))
    return None if any(operand.value < 0 for operand in recipe.operands()) else recipe


def shortcut(recipe: Recipe, result: Any, value_of: Callable[[torch.Tensor], int]) -> Recipe | None:
    """A cheaper run to the first tensor of ``result``; whether to the same bits is to be tried.

    A norm over the batch saves its statistics. With them the second of its two kernels is enough.
    """
    if str(recipe.func) not in _BATCH_NORMS:
        return None
    outputs = list(tensors_in((result,)))
    mean, scale = (Operand(value_of(it), Geometry.of(it)) for it in outputs[1:3])
    args = recipe.args
    operands = (args[_INPUT], args[_WEIGHT], args[_BIAS], mean, scale, args[_EPS])
    norm = torch.ops.aten.batch_norm_elemt.default
    return Recipe(norm, operands, {}, (value_of(outputs[0]),))


def repeats(recipe: Recipe, args: tuple[Any, ...], kwargs: Any, result: Any) -> bool:
    """Whether running the op once more gives the same bits; False where there is no room for it.

    Parameters
    ----------
    args, kwargs, result
        Of the call that has just been made.
    """
    if str(recipe.func) in IN_PLACE:
        return True
    tensors = iter(list(tensors_in((_as_replayed(recipe, args), *kwargs.values()))))
    run = partial(recipe.run, lambda _: next(tensors))
    wanted = list(tensors_in((result,)))
    if str(recipe.func) in _CHOSEN and wanted[0].device.type == "cuda":
        run = partial(in_backward, wanted[0].device, run)
    return reaches(run, wanted, NoClock())


def reaches(
    run: Callable[[], Sequence[torch.Tensor]], wanted: Sequence[torch.Tensor], clock: Clock
) -> bool:
    """Whether ``run`` gives the bits of ``wanted``; ``clock`` brackets it.

    False also where there is no kernel for this device, or no room.
    """
    try:
        clock.start()
        try:
            made = run()
        finally:
            clock.stop()
        return len(made) == len(wanted) and all(map(_same_bits, wanted, made))
    except RuntimeError:
        return False


def _as_replayed(recipe: Recipe, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments without those that a replay leaves out."""
    return tuple(None if kept is None else arg for kept, arg in zip(recipe.args, args, strict=True))


def _same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    if one.shape != two.shape or one.stride() != two.stride() or one.dtype != two.dtype:
        return False
    nbytes = one.untyped_storage().nbytes()
    if two.untyped_storage().nbytes() != nbytes:
        return False
    # As bytes: NaN equals itself, and 0 is not -0. In pieces, as comparing takes as much again.
    pieces = ((start, min(start + _COMPARED, nbytes)) for start in range(0, nbytes, _COMPARED))
    return all(torch.equal(content_of(one, *it), content_of(two, *it)) for it in pieces)
