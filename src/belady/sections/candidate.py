"""Which modules of a call may run in slices: by its trace, and by trials of the modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from belady.errors import SectionError, TraceError
from belady.forwards import is_scripted
from belady.ir.along import Dims
from belady.ir.plan import Section
from belady.ir.trace import Trace
from belady.measure.batch import static_trace_with_batch
from belady.measure.resized import samples_of
from belady.sections.allowed import reasons
from belady.sections.given import Shared, separated
from belady.sections.stages import is_sequential
from belady.sections.trial import trial

# Slices in a trial at most: their samples are run as a whole too, where memory is scarce. Of
# tokens, those of so many samples.
_TRIED, _OF_SAMPLES = 8, 2

Call = tuple[Any, Any]

# Dimensions along which modules can be cut: samples, and the tokens of each.
ALONGS = (0, 1)


class Candidate:
    """A call of a root, traced with its batch, and which of its modules may be cut.

    Attributes
    ----------
    module, trace
        The root, and its static trace with batch dimensions.
    call
        What it is called with.
    refused
        Why what was asked about may not be cut, by the first module of it.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Call,
        seen: _Seen,
        device: torch.device,
        alongs: Sequence[int] = ALONGS,
    ) -> None:
        self.module = module
        self._alongs = alongs
        self.trace = seen.trace
        self.call = call
        self._seen: dict[int, _Seen | None] = {0: seen}
        self._device = device
        self.refused: dict[str, str] = {}
        self._known: dict[tuple[tuple[str, ...], int], bool] = {}

    @classmethod
    def of(
        cls,
        module: nn.Module,
        call: Call,
        device: torch.device,
        alongs: Sequence[int] = ALONGS,
    ) -> Candidate | None:
        """Trace a call that may be cut ``alongs`` these; None if only running it can tell."""
        seen = _seen(module, call, device, 0)
        return None if seen is None else cls(module, call, seen, device, alongs)

    def dims(self, along: int) -> Dims | None:
        """Where rows along a dimension are in what each op reads; None if that is not known."""
        if along not in self._alongs:
            return None
        if along not in self._seen:
            self._seen[along] = self._also_seen(along)
        seen = self._seen[along]
        return None if seen is None else [op.batch_dims for op in seen.trace.ops]

    def _also_seen(self, along: int) -> _Seen | None:
        seen = _seen(self.module, self.call, self._device, along)
        ops = () if seen is None else seen.trace.ops
        same = [op.name for op in ops] == [op.name for op in self.trace.ops]
        if same and any(op.batch_dims for op in ops):
            return seen
        if samples_of(self.call) == 1:
            # Of more samples, what hinders slices along the batch says more.
            self.refused[""] = (
                "there is one sample, and where its tokens are is not known: one token less cannot "
                "be traced, or runs other ops"
            )
        return None

    def given(self, module: nn.Module, call: int = 0) -> Input | None:
        """What a module of the root is called with, in its first call or a later one.

        None where not with one tensor of samples and what all share.
        """
        seen = self._seen[0]
        # As traced, and as many with one sample more.
        calls = [] if seen is None else seen.inputs.get(module, [])
        found = calls[call] if call < len(calls) // 2 else ""
        return None if isinstance(found, str) else found

    def may_cut(self, section: Section) -> bool:
        """Whether the modules of a section may run in slices, as a trial of them shows."""
        key = section.modules, section.along
        if key not in self._known:
            reason = self._reason(section)
            if reason:
                self.refused.setdefault(section.modules[0], reason)
            self._known[key] = not reason
        return self._known[key]

    def _reason(self, section: Section) -> str:
        """Why not; empty if it may."""
        model, name, along = self.module, section.modules[0] or "the model", section.along
        seen = self._seen.get(along)
        if seen is None:
            return f"where the {section.whole} are is not known"
        calls = seen.inputs.get(model.get_submodule(section.modules[0]), [])
        # As traced, and with one sample more or one token less.
        taken, other = calls[0] if calls else "", calls[len(calls) // 2] if calls else ""
        owner = model.get_submodule(section.modules[0].rpartition(".")[0])
        if len(section.modules) > 1 and owner not in seen.inputs:
            return f"{name} and those after it are called one by one"
        if isinstance(taken, str) or isinstance(other, str):
            return str(taken or other) or f"{name} is not called"
        if not taken.dtype.is_floating_point:
            return f"{name} is not called with a tensor of floating-point numbers"
        if other.shape[along] != taken.shape[along] + (-1 if along else 1):
            which = "second" if along else "first"
            return f"{name} is not called with the {section.whole} in the {which} dimension"
        found = reasons(model, section, seen.trace)
        return found[0] if found else self._failure(section, taken)

    def _failure(self, section: Section, taken: Input) -> str:
        few = replace(section, slices=min(section.slices, _TRIED))
        try:
            sample = taken.sample(2 * few.slices, section.along, self._device)
            trial(self.module, few, sample, taken.shared.mapped(self._made_up))
        except SectionError as error:
            return str(error)
        except torch.OutOfMemoryError:
            return (
                "a few samples, on which slices are tried, do not fit beside what is held already"
            )
        # The user's code runs on few samples and made-up numbers, as it never did before.
        except Exception as error:
            return f"it could not be tried: {type(error).__name__}: {error}"
        return ""

    def _made_up(self, item: Any) -> Any:
        return item.made_up(self._device) if isinstance(item, _Like) else item


def chains(model: nn.Module) -> list[tuple[str, ...]]:
    """Paths of the children of every Sequential in ``model``, then of others, innermost first.

    The empty path stands for ``model`` itself.
    """
    found = []
    for name, module in model.named_modules():
        if is_sequential(module):
            prefix = f"{name}." if name else ""
            found.append(tuple(f"{prefix}{child}" for child, _ in module.named_children()))
    chained = {name for chain in found for name in chain}
    alone = [name for name, _ in model.named_modules() if name and name not in chained]
    alone.sort(key=lambda name: -name.count("."))
    return found + [(name,) for name in (*alone, "")]


class _Like(NamedTuple):
    """What a tensor is like; the tensor would live on, which the trace would show."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, item: Any) -> Any:
        """A tensor as what it is like, anything else as it is."""
        return cls(item.shape, item.dtype) if isinstance(item, torch.Tensor) else item

    def made_up(self, device: torch.device) -> torch.Tensor:
        """A tensor of numbers that no generator is asked for; places and counts are 0."""
        ramp = torch.arange(self.shape.numel(), dtype=torch.float64, device=device)
        numbers = ramp.mul_(0.7).sin_().view(self.shape)
        if self.dtype is torch.bool:
            return numbers > 0
        return numbers.to(self.dtype)


class Input(NamedTuple):
    """What a module was called with."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    shared: Shared

    def sample(self, count: int, along: int, device: torch.device) -> torch.Tensor:
        """A few samples, or a few tokens of these."""
        few = [min(self.shape[0], _OF_SAMPLES)] if along else []
        shape = (*few, min(self.shape[along], count), *self.shape[along + 1 :])
        like = _Like(torch.Size(shape), self.dtype)
        return like.made_up(device).requires_grad_(self.requires_grad)


# Of each module its calls, or why they cannot be cut.
_Inputs = dict[nn.Module, list[Input | str]]


class _Seen(NamedTuple):
    """A trace of the root, and what its modules were called with there, and with other sizes."""

    trace: Trace
    inputs: _Inputs


def _seen(module: nn.Module, call: Call, device: torch.device, along: int) -> _Seen | None:
    inputs: _Inputs = {}
    try:
        with _noting_inputs(module, inputs, along):
            return _Seen(static_trace_with_batch(module, call, device, along), inputs)
    except TraceError:
        return None


@contextmanager
def _noting_inputs(model: nn.Module, into: _Inputs, along: int) -> Iterator[None]:
    """Take down what each module is called with."""

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls = into.setdefault(module, [])
        try:
            given, shared = separated(type(module).__name__, args, kwargs, along)
        except SectionError as error:
            calls.append(str(error))
        else:
            like = shared.mapped(_Like.of)
            calls.append(Input(given.shape, given.dtype, given.requires_grad, like))

    handles = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in model.modules()
        if not is_scripted(module)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
