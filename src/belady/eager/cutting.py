"""Runs modules in slices where a single op is over the budget, before anything has run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._prims_common import suggest_memory_format
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

from belady.errors import SectionError, TraceError
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Section
from belady.ir.trace import Trace
from belady.measure.batch import static_trace_with_batch
from belady.measure.stages import Policy
from belady.measure.static import trained_bytes
from belady.planners.sectioning import Sectioning, Sections, over_budget, with_workspaces
from belady.sections.allowed import reasons
from belady.sections.stages import is_sequential
from belady.sections.trial import trial
from belady.sections.wrap import wrap

# What cuts modules by itself (tvDNN's "memory-object sectioning"); the others do as they are told.
POLICIES = frozenset({"auto", "tvdnn_ilp", "tvdnn_greedy"})
# Copies of the parameters that an optimizer may keep, most first: Adam's two, momentum, or none.
_COPIES = (2, 1, 0)
# Most workspace of cuDNN's algorithms with tensor cores and without, in NCHW and in channels_last,
# in bytes of the largest operand (H200; `python -m benchmarks kernels --question convolution`).
_WITH_TENSOR_CORES, _WITHOUT = (2.0, 0.0), (6.3, 8.3)
# Parts of the budget that the floor in slices is to fit in, tried in turn: what a plan keeps beside
# it saves more time than a few more slices cost.
_ROOM = (0.85, 1.0)
# Slices in a trial at most: their samples are run as a whole too, where memory is scarce.
_TRIED = 8
# How often modules are cut anew where the iteration that was observed needs more than its static
# trace said, and for how much less each time than what would have done.
_ANEW, _LESS = 2, 0.98

Call = tuple[Any, Any]


class Cutting:
    """The sections in force."""

    def __init__(self, policy: Policy, hardware: HardwareProfile) -> None:
        self._policy = policy
        self._hardware = hardware
        self._undo: dict[nn.Module, Callable[[], None]] = {}
        self._said: dict[nn.Module, list[str]] = {}
        self._anew = 0
        self._allowed = 1.0

    @property
    def said(self) -> list[str]:
        """What a user should know of the sections in force, or last in force, one sentence each."""
        return [sentence for sentences in self._said.values() for sentence in sentences]

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._undo

    def cut(self, module: nn.Module, call: Call, device: torch.device) -> bool:
        """Run modules of ``module`` in slices so that a call can fit; False if none will do.

        Each section is tried on random numbers first, on the real modules, in a few samples.
        """
        found = _Call.of(module, call, device) if self._may_cut(module) else None
        beside = dict.fromkeys((_workspace_share(module, call, device), 0.0))
        return found is not None and any(self._cut(found, share, _COPIES) for share in beside)

    def make_room(self, module: nn.Module, call: Call, device: torch.device, trace: Trace) -> None:
        """Cut modules whose ops would fit, but not beside the workspaces of a library.

        Parameters
        ----------
        trace
            Static, of this call.
        """
        # Without tensor cores an algorithm with no workspace costs little: slices could cost more.
        share = min(_workspace_share(module, call, device), max(_WITH_TENSOR_CORES))
        if not share or not self._may_cut(module):
            return
        asking = with_workspaces(trace, share)
        if over_budget(asking, self._hardware, self._policy.budget) > 0:
            found = _Call.of(module, call, device)
            if found is not None:
                self._cut(found, share, _COPIES[-1:])

    def _may_cut(self, module: nn.Module) -> bool:
        policy = self._policy
        return not policy.exact and policy.name in POLICIES and module not in self._undo

    def _cut(self, call: _Call, share: float, copies: Sequence[int]) -> bool:
        sections = self._chosen(call, share, copies)
        if not sections:
            return False
        self._undo[call.module] = wrap(call.module, sections)
        self._said[call.module] = [_sentence(section) for section in sections]
        return True

    def too_coarse(self, module: nn.Module, trace: Trace) -> bool:
        """Undo the sections of ``module`` if they do not do; then `cut` cuts finer.

        Parameters
        ----------
        trace
            As observed, with the workspaces and the optimizer's state that there are.
        """
        if module not in self._undo or self._anew == _ANEW:
            return False
        over = over_budget(trace, self._hardware, self._policy.budget)
        if over <= 0:
            return False
        self._anew += 1
        budget = self._policy.budget.device_bytes
        self._allowed *= _LESS * budget / (budget + over)
        self._undo.pop(module)()
        del self._said[module]
        return True

    def close(self) -> None:
        """Let all modules run as they did."""
        while self._undo:
            self._undo.popitem()[1]()

    def _chosen(self, call: _Call, share: float, copies: Sequence[int]) -> Sections | None:
        """Sections beside the most copies of what is trained that leave room for any."""
        asking, budget = with_workspaces(call.trace, share), self._policy.budget
        search = Sectioning(asking, self._hardware, budget, chains(call.module), call.may_cut)
        allocator = self._hardware.allocator
        rooms = dict.fromkeys((*(room * self._allowed for room in _ROOM), _ROOM[-1]))
        for count, room in product(copies, rooms):
            # State is there throughout: the rest has so much less.
            state = count * trained_bytes(call.trace)
            rest = allocator.peak_within(int(room * budget.device_bytes)) - state
            found = search.within(allocator.budget_for(rest))
            if found:
                return found
        return None


class _Call:
    """A call of a root, traced with its batch, and which of its modules may be cut."""

    def __init__(
        self,
        module: nn.Module,
        trace: Trace,
        inputs: dict[nn.Module, _Input],
        device: torch.device,
    ) -> None:
        self.module = module
        self.trace = trace
        self._inputs = inputs
        self._device = device
        self._known: dict[tuple[str, ...], bool] = {}

    @classmethod
    def of(cls, module: nn.Module, call: Call, device: torch.device) -> _Call | None:
        """Trace a call; None if only running it can tell."""
        inputs: dict[nn.Module, _Input] = {}
        try:
            with _noting_inputs(module, inputs):
                trace = static_trace_with_batch(module, call, device)
        except TraceError:
            return None
        return cls(module, trace, inputs, device)

    def may_cut(self, section: Section) -> bool:
        """Whether the modules of a section may run in slices, as a trial of them shows."""
        if section.modules not in self._known:
            self._known[section.modules] = self._try(section)
        return self._known[section.modules]

    def _try(self, section: Section) -> bool:
        model = self.module
        taken = self._inputs.get(model.get_submodule(section.modules[0]))
        owner = model.get_submodule(section.modules[0].rpartition(".")[0])
        if len(section.modules) > 1 and owner not in self._inputs:
            # Its children are called one by one, and nothing would be cut.
            return False
        if taken is None or not taken.dtype.is_floating_point:
            return False
        if reasons(model, section, self.trace):
            return False
        few = replace(section, slices=min(section.slices, _TRIED))
        try:
            trial(model, few, taken.sample(2 * few.slices, self._device))
        except (SectionError, torch.OutOfMemoryError):
            return False
        return True


def _workspace_share(module: nn.Module, call: Call, device: torch.device) -> float:
    """What a convolution may ask for, of its largest operand; nothing on a CPU."""
    if device.type != "cuda":
        return 0.0
    parameters = list(module.parameters())
    halves = any(it.dtype in (torch.float16, torch.bfloat16) for it in parameters)
    reduced = torch.backends.cudnn.allow_tf32 or torch.is_autocast_enabled("cuda") or halves
    # One operand is enough for cuDNN to take both so.
    given = [it for it in tree_leaves(call) if isinstance(it, torch.Tensor)]
    weights = [it.weight for it in module.modules() if isinstance(it, _ConvNd)]
    last = any(map(_is_channels_last, (*given, *weights)))
    return (_WITH_TENSOR_CORES if reduced else _WITHOUT)[last]


def _is_channels_last(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.dim() not in (4, 5):
        return False
    return suggest_memory_format(tensor) is not torch.contiguous_format


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


class _Input(NamedTuple):
    """What a tensor is like; the tensor would live on, which the trace would show."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    def sample(self, count: int, device: torch.device) -> torch.Tensor:
        """A few samples, of numbers that no generator is asked for."""
        shape = (min(self.shape[0], count), *self.shape[1:])
        ramp = torch.arange(torch.Size(shape).numel(), dtype=torch.float64, device=device)
        numbers = ramp.mul_(0.7).sin_().view(shape).to(self.dtype)
        return numbers.requires_grad_(self.requires_grad)


@contextmanager
def _noting_inputs(model: nn.Module, into: dict[nn.Module, _Input]) -> Iterator[None]:
    """Take down what each module is called with first, if that is one tensor."""

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if len(args) == 1 and not kwargs else None
        if module not in into and isinstance(given, torch.Tensor) and given.dim():
            into[module] = _Input(given.shape, given.dtype, given.requires_grad)

    handles = [
        module.register_forward_pre_hook(note, with_kwargs=True) for module in model.modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _sentence(section: Section) -> str:
    ends = [it or "the model" for it in dict.fromkeys((section.modules[0], section.modules[-1]))]
    run = "run" if len(ends) > 1 else "runs"
    return (
        f"{' to '.join(ends)} {run} in {section.slices} slices along the batch, since one op was "
        "over the budget, or would have been beside the workspace that it may ask for: results "
        "differ from plain PyTorch by the order of sums"
    )
