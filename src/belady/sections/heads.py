"""Attention in slices of heads, wherever it is called, where no fused kernel takes it.

`scaled_dot_product_attention` has a path of ordinary ops for what no fused kernel does: it makes
the matrix of all queries and keys of all heads, several times over, and saves it for backward. Of
one long sequence, slices along the batch do not cut it. Heads do not depend on one another, so
slices of heads compute the same, and backward makes the matrix of each slice again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn.attention import SDPBackend

from belady.sections.gate import Gate, calls_under_way, in_backward
from belady.sections.headwise import HALVES, Options, attend, slices_of
from belady.sections.standing import Function, Standing, is_faked, is_ordinary

# What autocast casts.
_CAST = HALVES | {torch.float32}
_FLOATS = _CAST | {torch.float64}


class Heads(Standing):
    """Stands in the place of `torch.nn.functional.scaled_dot_product_attention`.

    Parameters
    ----------
    device
        Of the attention that it takes care of.
    least_bytes
        Size in bytes of the matrix, of all heads, from which on it is made in slices.
    gate
        Open while a pass is under way.
    roots
        Modules whose calls without grad, which are no passes, count in the budget all the same; the
        list may grow.

    Attributes
    ----------
    largest_bytes
        Of all matrices that were made in slices so far.
    calls
        How many were.
    """

    def __init__(
        self, device: torch.device, least_bytes: int, gate: Gate, roots: Sequence[torch.nn.Module]
    ) -> None:
        super().__init__("scaled_dot_product_attention")
        self.largest_bytes = self.calls = 0
        self._traces = False
        self._device = device
        self._least_bytes = least_bytes
        self._gate, self._roots = gate, roots

    def call(self, plain: Function, *args: Any, **kwargs: Any) -> Tensor:
        """Attention, in slices where it would make a large matrix."""
        try:
            tensors, options = _called(*args, **kwargs)
        except TypeError:  # the plain one says what is wrong
            return plain(*args, **kwargs)
        if options is None or not self._takes(options, tensors):
            return plain(*args, **kwargs)
        *samples, heads, _, _ = tensors.query.shape
        one = tensors.matrix_bytes // math.prod(samples)
        cut = slices_of(samples, heads, tensors.key.shape[-3], one)
        if not is_faked(tensors.query):
            self.largest_bytes = max(self.largest_bytes, tensors.matrix_bytes)
            self.calls += 1
        return attend(options, cut, tensors.cast())

    def _takes(self, options: Options, tensors: _Tensors) -> bool:
        return (
            is_ordinary(*_present(tensors))
            and tensors.fit(options)
            and tensors.query.device.type == self._device.type
            and math.prod(tensors.query.shape[:-2]) > 1
            and tensors.matrix_bytes >= self._least_bytes
            and self._is_judged(tensors.query)
            and tensors.need_matrix(options)
        )

    def _is_judged(self, query: Tensor) -> bool:
        """Whether a call belongs to one of a root, or to what is traced before it.

        A checkpoint calls again in backward, where no pass is under way, and wants the same saved
        tensors as before. So what it calls is judged by what is the same both times: the modules
        between it and the call.
        """
        if is_faked(query):
            return self._traces
        in_checkpoint, callers = _callers()
        if in_checkpoint or in_backward():
            ours = {id(module) for root in self._roots for module in root.modules()}
            return not ours.isdisjoint(map(id, callers))
        if self._gate.is_here:
            return True
        return not torch.is_grad_enabled() and any(map(calls_under_way, self._roots))

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """What is traced meanwhile is of the roots."""
        self._traces = True
        try:
            yield
        finally:
            self._traces = False


def _called(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[_Tensors, Options | None]:
    """Tensors and options of a call."""
    return _Tensors(query, key, value, attn_mask), _options(*args, **kwargs)


def _options(
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Options | None:
    """None for what would draw other numbers in slices."""
    return None if dropout_p else Options(is_causal, scale, enable_gqa)


class _Tensors(NamedTuple):
    """What attention is of."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        """Of the queries as kernels see them."""
        return _seen_dtype(self.query)

    @property
    def matrix_bytes(self) -> int:
        """Of all products of queries and keys."""
        rows = math.prod(self.query.shape[:-1])
        return rows * self.key.shape[-2] * (4 if self.dtype in HALVES else self.dtype.itemsize)

    def fit(self, options: Options) -> bool:
        """Whether each head, or group of heads, is attention by itself; else plain PyTorch says."""
        query, key, value, mask = self
        present = _present(self)
        strided = all(it.layout is torch.strided and not it.is_nested for it in present)
        alike = len({it.device for it in present}) == len({it.dim() for it in self[:3]}) == 1
        if not strided or not alike or query.dim() < 3 or not query.shape[-1]:
            return False
        (*samples, heads, _, width), (*others, groups, _, same) = query.shape, key.shape
        shared = heads == groups or (options.grouped and groups > 0 and heads % groups == 0)
        dtypes = {_seen_dtype(it) for it in self[:3]}
        fit = (samples, width, value.shape[:-1]) == (others, same, key.shape[:-1])
        return fit and shared and dtypes == {self.dtype} <= _FLOATS and self._fits(mask, options)

    def _fits(self, mask: Tensor | None, options: Options) -> bool:
        if mask is None:
            return True
        whole = (*self.query.shape[:-1], self.key.shape[-2])
        alike = zip(reversed(mask.shape), reversed(whole), strict=False)
        spread = all(size in (1, full) for size, full in alike)
        known = _seen_dtype(mask) in (torch.bool, torch.float32, self.dtype)
        return known and spread and 2 <= mask.dim() <= len(whole) and not options.causal

    def need_matrix(self, options: Options) -> bool:
        """Whether PyTorch would take the path of ordinary ops."""
        query, key, value = (_Like.of(it) for it in self[:3])
        mask = None if self.mask is None else _Like.of(self.mask)
        causal, scale, grouped = options
        # Else a mode would be asked, which may know of no device, or take it down as an op.
        with torch._C._DisableTorchDispatch():
            chosen = torch._fused_sdp_choice(
                query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=grouped
            )
        return chosen == SDPBackend.MATH.value

    def cast(self) -> list[Tensor | None]:
        """As autocast casts them; no more, as it casts nothing inside."""
        return [None if it is None else it.to(_seen_dtype(it)) for it in self]


def _present(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return [it for it in tensors if it is not None]


def _seen_dtype(tensor: Tensor) -> torch.dtype:
    """With autocast, which casts what attention is given."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.dtype in _CAST:
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


class _Like(Tensor):
    """What a tensor looks like to who chooses a kernel: it has no bytes, and none are looked at."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, op: Any, *_: Any) -> NoReturn:
        raise NotImplementedError(f"{op} of a tensor without bytes")

    @staticmethod
    def of(tensor: Tensor) -> Tensor:
        """Also of one that a mode has put in the place of one on a device."""
        dtype = _seen_dtype(tensor)
        like: Tensor = Tensor._make_wrapper_subclass(
            _Like,
            tensor.shape,
            # What autocast casts, it lays out anew.
            strides=tensor.stride() if tensor.dtype is dtype else _dense(tensor),
            dtype=dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )
        return like


def _callers() -> tuple[bool, list[object]]:
    """Whether a checkpoint has called, and whose methods are on the stack inside of it."""
    frame, found = sys._getframe(), list[object]()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True, found
        found.append(frame.f_locals.get("self"))
    return False, found


def _dense(tensor: Tensor) -> tuple[int, ...]:
    """Strides of a copy."""
    with torch._C._DisableTorchDispatch():
        like = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
        return like.clone().stride()
