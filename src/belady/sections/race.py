"""Which of several choices of slices runs fastest: the convolutions in them are tried.

How long cuDNN takes for a slice depends on which of its algorithms knows that size, and which gets
the workspace that it asks for. Without tensor cores both matter much, and no rule for sizes
foretells either: ``python -m benchmarks kernels --question slices`` shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf, prod
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from belady.forwards import run_plain
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Section
from belady.ir.trace import Phase
from belady.measure.clock import clock_for
from belady.memory.allowance import allowance
from belady.planners.places import Chain, Sections, easier, with_sections
from belady.planners.sectioning import Sectioning
from belady.planners.slicework import inside
from belady.planners.workspace import convolves
from belady.sections.candidate import Candidate, chains
from belady.sections.workspaces import is_channels_last

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default
# The first call of a kind may have cuDNN time its algorithms, and the second load a kernel.
_UNTIMED, _TIMED = 2, 3
# So long after the first no other choice is tried: cuDNN takes seconds for some kinds. And what
# takes more than this of the time is not worth looking on from.
_SECONDS, _LESS = 40.0, 0.99
# What tensors are filled with: sizes and layouts tell how long kernels take.
_NUMBER = 0.5
# Those of torch itself, which keep nothing of a call.
_CONVOLUTIONS = frozenset(
    (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
)

Limit = Callable[[torch.device, int], AbstractContextManager[None]]


class _Slice(NamedTuple):
    """A convolution of one slice.

    Attributes
    ----------
    times
        How many slices there are.
    made_bytes, free_bytes
        Of its result, and what is left beside all that is held while it runs.
    """

    times: int
    module: nn.Module
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool
    made_bytes: int
    free_bytes: int

    @property
    def kind(self) -> Hashable:
        """What takes as long; of what is free the order of magnitude matters."""
        of = type(self.module), self.module.weight.shape, self.module.extra_repr()
        return (*of, self.shape, self.dtype, self.needs_gradient, self.free_bytes.bit_length())

    @property
    def read_bytes(self) -> int:
        """Of what goes in."""
        return prod(self.shape) * self.dtype.itemsize


class Race:
    """Times choices of slices of one call.

    Attributes
    ----------
    search
        Without workspaces: it says what is held beside a convolution.

    Parameters
    ----------
    known
        Seconds by kind of convolution, which are added to.
    limit
        Lets torch take so many bytes of the device and no more.
    """

    def __init__(
        self,
        call: Candidate,
        search: Sectioning,
        device: torch.device,
        hardware: HardwareProfile,
        known: dict[Hashable, float],
        limit: Limit = allowance,
    ) -> None:
        self._call, self.search, self._device = call, search, device
        self._modules = dict(call.module.named_modules())
        self._chains = chains(call.module)
        self._hardware, self._known, self._limit = hardware, known, limit
        last = is_channels_last(call.module, call.call)
        self._format = torch.channels_last if last else torch.contiguous_format

    @property
    def knows_all(self) -> bool:
        """Whether every convolution of the call can be tried."""
        ops = [it for it in self._call.trace.ops if convolves(it) and it.phase is Phase.FORWARD]
        return all(type(self._modules.get(op.module)) in _CONVOLUTIONS for op in ops)

    def fastest(self, choices: Sequence[Sections], room: int, limits: Sequence[int]) -> Sections:
        """The choice that takes least time, or one near it, or none, if that takes less.

        Parameters
        ----------
        room
            Bytes that an iteration may hold at its peak, less what an optimizer keeps.
        limits
            Budgets beside that: what is near a choice fits in the smallest in which that does.
        """
        tried: Iterable[Sections] = choices
        if self.search.fits((), max(limits, default=0)):
            tried = [*choices, ()]
        best, least, until = choices[0], inf, inf
        while True:
            before = least
            for sections in tried:
                if perf_counter() >= until:
                    break
                seconds = self._seconds(sections, room)
                # Without the first there is nothing to compare with, however long it takes.
                until = min(until, perf_counter() + _SECONDS)
                # The real modules run for an answer: asked last.
                if seconds < least and self.search.allows(sections):
                    best, least = sections, seconds
            if not least < _LESS * before:
                return best
            limit = min(filter(partial(self.search.fits, best), limits), default=0)
            # One by one: of a trace of many ops it takes a second to know whether sections fit.
            near = dict.fromkeys(_near(best, self._chains))
            tried = filter(partial(self.search.fits, nbytes=limit), near)

    def _seconds(self, sections: Sections, room: int) -> float:
        """What convolutions take under ``sections``, and all ops for their bytes."""
        kernels = sum(it.times * self._of(it) for it in self._slices(sections, room))
        return kernels + self._hardware.memory_seconds(self.search.work(sections))

    def _slices(self, sections: Sections, room: int) -> Iterator[_Slice]:
        trace, held = self.search.floor(sections)
        most: dict[str, int] = {}
        for op, nbytes in zip(trace.ops, held, strict=True):
            if convolves(op):
                most[op.module] = max(most.get(op.module, 0), nbytes)
        whole = self._call.trace
        for op in whole.ops:
            module = self._modules.get(op.module)
            if module is None or type(module) not in _CONVOLUTIONS or not convolves(op):
                continue
            given = self._call.given(module)
            if given is None or op.phase is not Phase.FORWARD:
                continue
            within = (it for it in sections if inside(op.module, it.modules))
            slices, along = next(((it.slices, it.along) for it in within), (1, 0))
            rows = given.shape[along]
            times = min(slices, rows)
            size = -(-rows // times)
            shape = (*given.shape[:along], size, *given.shape[along + 1 :])
            made = sum(whole.storages[whole.values[value].storage].nbytes for value in op.writes)
            # A module that slices take apart bears another name there.
            free = max(0, room - most.get(op.module, max(held)))
            yield _Slice(
                times, module, shape, given.dtype, given.requires_grad, made * size // rows, free
            )

    def _of(self, slice_: _Slice) -> float:
        if slice_.kind not in self._known:
            try:
                self._known[slice_.kind] = self._timed(slice_)
            except RuntimeError:  # also: out of memory
                self._known[slice_.kind] = inf
        return self._known[slice_.kind]

    def _timed(self, slice_: _Slice) -> float:
        """Seconds of forward and backward, with as little room beside as there will be.

        On a thread of its own. PyTorch keeps cuDNN's choices for each thread, whatever room there
        was when they were made: neither another trial nor training may go on with those of this.
        """
        here: AbstractContextManager[Any] = nullcontext()
        if self._device.type == "cuda":
            here = torch.cuda.stream(torch.cuda.current_stream(self._device))
        with ThreadPoolExecutor(1) as alone:
            return alone.submit(self._alone, slice_, here).result()

    def _alone(self, slice_: _Slice, here: AbstractContextManager[Any]) -> float:
        room, read = slice_.free_bytes, slice_.read_bytes
        with here, torch.no_grad():
            with self._limit(self._device, room + read + slice_.made_bytes):
                images, weight, bias, *rest = _called(slice_.module, self._filled(slice_))
                seconds = self._median(lambda: _FORWARD(images, weight, bias, *rest))
                gradient = _FORWARD(images, weight, bias, *rest)
            trained = [it is not None and it.requires_grad for it in (weight, bias)]
            mask = [slice_.needs_gradient, *trained]
            if not any(mask):
                return seconds
            sizes = None if bias is None else list(bias.shape)
            with self._limit(self._device, room + read + weight.nbytes):
                return seconds + self._median(
                    lambda: _BACKWARD(gradient, images, weight, sizes, *rest, mask)
                )

    def _filled(self, slice_: _Slice) -> Tensor:
        x = torch.full(slice_.shape, _NUMBER, dtype=slice_.dtype, device=self._device)
        if x.dim() == 4:
            x = x.contiguous(memory_format=self._format)
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


def _near(sections: Sections, chains: Sequence[Chain]) -> Iterator[Sections]:
    """Sections with more slices of one of them, or fewer; in two parts, or with what is beside."""
    for section in sections:
        yield with_sections(sections, [replace(section, slices=2 * section.slices)])
    yield from easier(sections)
    held_by = {name: it for it in sections for name in it.modules}
    for left, right in (pair for chain in chains for pair in pairwise(chain)):
        one, other = held_by.get(left), held_by.get(right)
        both = [it for it in (one, other) if it is not None]
        if one == other or len({it.along for it in both}) > 1:
            continue
        modules = (*(one.modules if one else (left,)), *(other.modules if other else (right,)))
        for slices in dict.fromkeys(it.slices for it in both):
            yield with_sections(sections, [Section(modules, slices, both[0].along)])
