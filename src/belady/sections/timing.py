"""How long a convolution of one slice takes on the device: it is tried."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from math import inf, prod
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from belady.forwards import run_plain
from belady.measure.clock import clock_for
from belady.memory.allowance import allowance

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default
# The first call of a kind may have cuDNN time its algorithms, and the second load a kernel.
_UNTIMED, _TIMED = 2, 3
# What tensors are filled with: sizes and layouts tell how long kernels take.
_NUMBER = 0.5
# Those of torch itself, which keep nothing of a call.
_CONVOLUTIONS = frozenset(
    (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
)
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

Limit = Callable[[torch.device, int], AbstractContextManager[None]]


def can_be_tried(module: nn.Module | None) -> bool:
    """Whether a module is a convolution of torch's own, with a weight that nobody makes anew."""
    if module is None or type(module) not in _CONVOLUTIONS:
        return False
    return weight_of(module) is not None


def weight_of(module: nn.Module) -> nn.Parameter | None:
    """The weight that a module holds as it is: as an attribute a parametrized one would be made."""
    return module._parameters.get("weight")


class Convolution(NamedTuple):
    """A convolution of one slice.

    Attributes
    ----------
    module
        One that `can_be_tried`.
    shape, dtype, needs_gradient
        Of what goes in.
    made_bytes
        Of what comes out.
    free_bytes
        What an iteration leaves beside all that it holds at that moment.
    """

    module: nn.Module
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool
    made_bytes: int
    free_bytes: int

    @property
    def kind(self) -> Hashable:
        """The same for two that take as long, beside free bytes of the same order of magnitude."""
        held = (it for it in self.module._parameters.values() if it is not None)
        parameters = tuple((it.shape, it.dtype, it.requires_grad) for it in held)
        of = type(self.module), self.module.extra_repr(), parameters
        return (*of, self.shape, self.dtype, self.needs_gradient, self.free_bytes.bit_length())

    @property
    def read_bytes(self) -> int:
        """Of what goes in."""
        return prod(self.shape) * self.dtype.itemsize


class Timing:
    """Times convolutions on a device, each kind once.

    Parameters
    ----------
    channels_last
        How images lie.
    known
        Seconds by kind, which are added to.
    limit
        Lets torch take so many bytes of the device and no more.
    """

    def __init__(
        self,
        device: torch.device,
        channels_last: bool,
        known: dict[Hashable, float],
        limit: Limit = allowance,
    ) -> None:
        self._device, self._last = device, channels_last
        self._known, self._limit = known, limit

    def __call__(self, it: Convolution) -> float:
        """Seconds of forward and backward; infinite where there is no room even to try."""
        kind = it.kind, self._last, torch.backends.cudnn.benchmark
        if kind not in self._known:
            try:
                self._known[kind] = self._tried(it)
            except RuntimeError:  # also: out of memory
                self._known[kind] = inf
        return self._known[kind]

    def _tried(self, it: Convolution) -> float:
        """Try on a thread of its own.

        PyTorch keeps cuDNN's choices for each thread, whatever room there was when they were made:
        neither another trial nor training is to go on with those of this. And no mode or hook that
        is in force here sees it.
        """
        here: AbstractContextManager[Any] = nullcontext()
        if self._device.type == "cuda":
            here = torch.cuda.stream(torch.cuda.current_stream(self._device))
        with ThreadPoolExecutor(1) as alone:
            return alone.submit(self._alone, it, here).result()

    def _alone(self, it: Convolution, here: AbstractContextManager[Any]) -> float:
        with here, torch.no_grad():
            with self._limit(self._device, it.free_bytes + it.read_bytes + it.made_bytes):
                images, weight, bias, *rest = _called(it.module, self._filled(it))
                seconds = self._median(lambda: _FORWARD(images, weight, bias, *rest))
                gradient = _FORWARD(images, weight, bias, *rest)
            trained = [held is not None and held.requires_grad for held in (weight, bias)]
            mask = [it.needs_gradient, *trained]
            if not any(mask):
                return seconds
            sizes = None if bias is None else list(bias.shape)
            with self._limit(self._device, it.free_bytes + it.read_bytes + weight.nbytes):
                return seconds + self._median(
                    lambda: _BACKWARD(gradient, images, weight, sizes, *rest, mask)
                )

    def _filled(self, it: Convolution) -> Tensor:
        x = torch.full(it.shape, _NUMBER, dtype=it.dtype, device=self._device)
        weight = weight_of(it.module)
        # Without a batch there are fewer dimensions, and one layout.
        if self._last and weight is not None and x.dim() == weight.dim() in _LAST:
            return x.contiguous(memory_format=_LAST[x.dim()])
        return x

    def _median(self, run: Callable[[], object]) -> float:
        for _ in range(_UNTIMED):
            run()
        clock = clock_for(self._device)
        for _ in range(_TIMED):
            clock.start()
            run()
            clock.stop()
        return median(seconds for seconds, _ in clock.results())


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what convolutions are called with."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[Any, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.convolution.default:
            self.seen.append(args)
        return func(*args, **(kwargs or {}))


def _called(module: nn.Module, images: Tensor) -> tuple[Any, ...]:
    """What the convolution of a module is called with: it may pad images by itself."""
    calls = _Calls()
    with calls:
        run_plain(module, images)
    return calls.seen[0]
