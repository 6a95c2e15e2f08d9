"""A part of an iteration that can be run again: what it changed is put back first."""

from __future__ import annotations

import gc
import random
import traceback
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, TypeGuard, TypeVar

import numpy as np
import torch

from belady.measure.key import parameters_of, walk
from belady.measure.starving import out_of_memory
from belady.measure.uninitialized import initialized, why_uninitialized

_Result = TypeVar("_Result")
# How often an attempt is made again.
RETRIES = 3
# Larger buffers and gradients are copied to the host: device memory is what is scarce.
_SMALL = 1 << 20
_TRAINED = (
    "The closure of vm.step was not run again, as it had changed a parameter: call the optimizer's "
    "step after vm.step, not inside of it (an nn.Embedding with max_norm writes to one too)"
)
_MADE = (
    "The closure of vm.step was not run again, as it initializes parameters, whose random numbers "
    "would be drawn once and not again: call the model once before vm.step, without gradients"
)
_TRIED = (
    f"The closure of vm.step was run {RETRIES + 1} times, the last with the most room that belady "
    "can leave; gradients, buffers and random states are as before it. If no larger budget is to "
    "be had, split the batch: forward and backward of each part, all in one closure"
)


class Engine(Protocol):
    """What runs the iterations."""

    roots: list[torch.nn.Module]

    @property
    def conductor(self) -> object:
        """What may know how much memory is needed."""
        ...

    def starved(self, error: torch.OutOfMemoryError) -> None:
        """Give the iteration under way up, and run the next ones in less memory."""
        ...


class _Kept(NamedTuple):
    """A tensor, and a copy of what was in it."""

    tensor: torch.Tensor
    copy: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Kept:
        small = tensor.layout is torch.strided and tensor.nbytes <= _SMALL
        there = tensor.device if small else torch.device("cpu")
        return cls(tensor, tensor.detach().to(there, copy=True))

    def put_back(self) -> torch.Tensor:
        """The tensor as it was: the same object."""
        if self.tensor.layout is torch.strided and 0 in self.tensor.stride():
            return self.tensor  # expanded: no op writes to it in place
        if self.tensor.layout is torch.strided:
            self.tensor.detach().copy_(self.copy)
        else:
            self.tensor.data = self.copy.to(self.tensor.device)
        return self.tensor


class Before:
    """Gradients, buffers and random states as they are before an attempt.

    Parameters
    ----------
    modules
        The models.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        modules = list(modules)
        self._makes = any(map(why_uninitialized, modules))
        # Each once, however many share it.
        inside = list(dict.fromkeys(walk(modules)))
        parameters = list(dict.fromkeys(parameters_of(inside)))
        self._versions = [(it, it._version) for it in parameters]
        self._gradients = [
            (it, None if it.grad is None else _Kept.of(it.grad)) for it in parameters
        ]
        self._buffers = [
            (
                module._buffers,
                {n: _Kept.of(b) if _has_bytes(b) else b for n, b in module._buffers.items()},
            )
            for module in inside
        ]
        self._random = random.getstate()
        self._numpy = np.random.get_state()  # noqa: NPY002 (what a closure may draw on)
        self._torch = torch.get_rng_state()
        # Of every device: which of them a closure draws on is not known before.
        self._cuda = torch.cuda.get_rng_state_all() if _on_cuda() else []

    def why_final(self) -> str:
        """Why the attempt cannot be made again; empty if it can."""
        if self._makes:
            return _MADE
        # As an optimizer's step does.
        written = any(it._version != version for it, version in self._versions)
        return _TRAINED if written else ""

    @torch.no_grad()
    def put_back(self) -> None:
        """Make all of it as it was; tensors are the same objects again."""
        for parameter, kept in self._gradients:
            parameter.grad = None if kept is None else kept.put_back()
        for buffers, found in self._buffers:
            back = {n: b.put_back() if isinstance(b, _Kept) else b for n, b in found.items()}
            # In one go: what was registered since is gone.
            buffers.clear()
            buffers.update(back)
        random.setstate(self._random)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


def attempt(closure: Callable[[], _Result], engine: Callable[[], Engine]) -> _Result:
    """Run ``closure``; where the device runs out of memory, put all back and run it again.

    Parameters
    ----------
    engine
        Gives the engine, which can become another one meanwhile.

    Raises
    ------
    OutOfMemoryError
        If it ran out of memory each time, or cannot be run again.
    """
    before = Before(engine().roots)
    for number in range(RETRIES + 1):
        try:
            return closure()
        except torch.OutOfMemoryError as error:
            engine().starved(error)
            _let_go(error)
            if why := before.why_final():
                raise out_of_memory(error, engine().conductor, why) from error
            if number == RETRIES:
                before.put_back()
                raise out_of_memory(error, engine().conductor, _TRIED) from error
        # What the attempt held is free here, as nothing refers to the error any more.
        gc.collect()
        if _on_cuda():
            torch.cuda.empty_cache()
        before.put_back()
    raise AssertionError("an attempt ends by its result or by an error")


def _has_bytes(buffer: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return buffer is not None and bool(initialized([buffer]))


def _on_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _let_go(error: BaseException) -> None:
    """Empty the frames of a traceback, whose variables hold the tensors of an attempt."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        found = left.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            traceback.clear_frames(found.__traceback__)
            left += [found.__cause__, found.__context__]
