"""`virtualize`: train a model within a budget of device memory; nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from belady._version import __version__
from belady.eager.conductor import Conductor
from belady.eager.kinds import Policy
from belady.eager.iteration import Iteration
from belady.eager.key import Key, pass_key
from belady.errors import BudgetError, InfeasibleBudgetError, TraceError
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Budget
from belady.ir.run import Run
from belady.ir.trace import Tier
from belady.measure.probe import probe
from belady.measure.static import static_trace
from belady.memory.cap import enforce
from belady.memory.carrier import Carrier
from belady.planners import POLICIES
from belady.planners import plan as make_plan
from belady.units import parse_bytes


@dataclass(frozen=True, slots=True)
class IterationStats:
    """One finished iteration, for listeners."""

    index: int
    seconds: float
    peak_bytes: int
    budget_bytes: int
    stall_seconds: float
    phase: str


@dataclass(frozen=True, slots=True)
class Limits:
    """What a `VirtualMemory` may use, as given."""

    budget: object
    host_budget: object = None
    disk_budget: object = None
    spill_dir: str | None = None
    policy: str = "auto"
    exact: bool = False

    def budgets(self) -> Budget:
        """Read the budgets in bytes."""
        host = None if self.host_budget is None else parse_bytes(self.host_budget, "host_budget")
        disk = None if self.disk_budget is None else parse_bytes(self.disk_budget, "disk_budget")
        return Budget(parse_bytes(self.budget), host, disk)


def virtualize(
    models: torch.nn.Module | Sequence[torch.nn.Module],
    budget: object,
    *,
    policy: str = "auto",
    host_budget: object = None,
    disk_budget: object = None,
    spill_dir: str | None = None,
    exact: bool = False,
) -> VirtualMemory:
    """Train within a budget of device memory, with the same results.

    Parameters
    ----------
    models
        A module or several; each call of one with grad enabled is a pass.
    budget
        Bytes as a number or text such as ``"12GiB"``. CUDA: bytes reserved by torch's allocator.
        CPU: bytes of live storages.
    policy
        ``"auto"``, ``"baseline"``, ``"floor"``, ``"vdnn_all"``, ``"vdnn_conv"`` or ``"vdnn_dyn"``.
    host_budget, disk_budget
        Most bytes of pinned host memory and of disk; None is what the machine has.
    spill_dir
        Folder on a disk for spilled bytes; None is the system's folder for temporary files.
    exact
        Forbid every decision that can change a bit of the result.

    Returns
    -------
    VirtualMemory
        Also a context manager; `VirtualMemory.close` leaves everything as it was found.

    Raises
    ------
    BudgetError
        If a budget cannot be read.
    ValueError
        If the policy is unknown.
    TypeError
        If ``models`` holds anything but modules.

    Notes
    -----
    An iteration ends at the optimizer's step. The first two of each kind run at the floor, where
    everything that can move does, and are observed; they are slow. A budget that no plan can keep
    is refused with `InfeasibleBudgetError` inside the first call, before anything runs.
    """
    limits = Limits(budget, host_budget, disk_budget, spill_dir, policy, exact)
    given = [models] if isinstance(models, torch.nn.Module) else list(models)
    return VirtualMemory(given, limits)


class VirtualMemory:
    """The memory of one or several models under a budget.

    Attributes
    ----------
    listeners
        Called with `IterationStats` after every iteration.
    """

    def __init__(self, models: Sequence[torch.nn.Module], limits: Limits) -> None:
        self._limits = limits
        self._budget = limits.budgets()
        if limits.policy not in POLICIES:
            raise ValueError(f"unknown policy {limits.policy!r}: one of {', '.join(POLICIES)}")
        self.listeners: list[Callable[[IterationStats], None]] = []
        self._models: list[torch.nn.Module] = []
        self._handles: list[Any] = [
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ended),
        ]
        self._conductor: Conductor | None = None
        self._carrier: Carrier | None = None
        self._iteration: Iteration | None = None
        self._inside: torch.nn.Module | None = None
        self._tracing = False
        self._whole = False
        self._stepped = False
        self._count = 0
        self._restore: Callable[[], None] | None = None
        self._closed = False
        try:
            for model in models:
                self.add(model)
        except BaseException:
            self.close()
            raise

    # -- for users -----------------------------------------------------------------------------

    def add(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Make ``module`` a root, from its next call on.

        With ``args`` (and ``kwargs``), from the call that is under way: for callers inside its
        pre-hooks.
        """
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"models must be torch.nn.Module, not {type(module).__name__}")
        if any(module is known for known in self._models):
            return
        self._models.append(module)
        self._handles += [
            module.register_forward_pre_hook(self._enter, with_kwargs=True),
            module.register_forward_hook(self._leave, always_call=True),
        ]
        if args is not None:
            self._enter(module, args, kwargs or {})

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """Make the block one iteration, and manage what a loss saves outside the roots too."""
        if self._whole or self._inside is not None:
            raise RuntimeError("vm.iteration() cannot be entered inside itself or inside a forward")
        self._whole = True
        try:
            yield
            self._finish(None)
        finally:
            self._whole = False

    def run(self) -> Run | None:
        """Trace, machine, plan, prediction and measurement; None until there is a plan."""
        if self._conductor is None:
            return None
        return self._conductor.run((("belady", __version__), ("torch", str(torch.__version__))))

    def report(self) -> str:
        """Say what moved and why, and what was measured against what was predicted."""
        from belady.report.text import describe

        run = self.run()
        return "belady: no iteration has been planned yet\n" if run is None else describe(run)

    @property
    def verified(self) -> bool | None:
        """Whether measured peaks kept to the budget; None before anything was verified."""
        return None if self._conductor is None else self._conductor.verified

    def close(self) -> None:
        """Take everything off the models and give all memory and files back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._abort()
        for handle in self._handles:
            handle.remove()
        if self._restore is not None:
            self._restore()
        if self._carrier is not None:
            self._carrier.close()

    def __enter__(self) -> VirtualMemory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- what torch tells ------------------------------------------------------------------------

    def _enter(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self._tracing or not torch.is_grad_enabled():
            return
        if self._inside is not None and self._inside is not module:
            return
        if self._inside is module:
            # The last call ended in a way that ran no hook (KeyboardInterrupt): start afresh.
            self._abort()
        conductor = self._conductor or self._set_up(module, args, kwargs)
        root = next(i for i, known in enumerate(self._models) if known is module)
        key = pass_key(root, module, (args, kwargs), conductor.carrier.device)
        if self._iteration is not None and self._is_over(key):
            self._finish(None)
        if self._iteration is None:
            self._iteration = conductor.start(key)
        self._inside = module
        self._iteration.enter(key, module, (args, kwargs))

    def _leave(self, module: torch.nn.Module, _args: Any, _result: Any) -> None:
        if module is self._inside and self._iteration is not None and not self._tracing:
            self._inside = None
            self._iteration.leave()

    def _optimizer_begins(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._iteration is not None:
            self._iteration.optimizer_begins()

    def _optimizer_ended(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._iteration is not None and self._owns(optimizer):
            self._stepped = True
            if not self._whole:
                self._finish(optimizer)

    def _is_over(self, key: Key) -> bool:
        """Whether the iteration under way ended without any optimizer (a hand-written update).

        As long as no optimizer was ever seen, a pass of the kind that the last one had is taken
        for a new iteration.
        """
        passes = self._iteration.passes if self._iteration is not None else []
        return not self._stepped and not self._whole and bool(passes) and passes[-1] == key

    def _owns(self, optimizer: torch.optim.Optimizer) -> bool:
        ours = {id(p) for model in self._models for p in model.parameters()}
        return any(id(p) in ours for group in optimizer.param_groups for p in group["params"])

    # -- iterations ----------------------------------------------------------------------------

    def _finish(self, optimizer: torch.optim.Optimizer | None) -> None:
        iteration, self._iteration = self._iteration, None
        conductor = self._conductor
        if iteration is None or conductor is None or not iteration.passes:
            return
        stage, sample = conductor.finish(iteration, optimizer)
        self._count += 1
        if self.listeners:
            peak = next((p.nbytes for p in sample.peaks if p.tier is Tier.DEVICE), 0)
            stats = IterationStats(
                self._count,
                sample.seconds,
                peak,
                self._budget.device_bytes,
                sample.stall_seconds,
                stage.value,
            )
            for listener in self.listeners:
                listener(stats)

    def _abort(self) -> None:
        self._inside = None
        iteration, self._iteration = self._iteration, None
        if iteration is not None:
            iteration.abort()

    def _set_up(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Conductor:
        device = _device_of(module)
        limits = self._limits
        hardware = probe(device, spill_dir=limits.spill_dir)
        total = hardware.capacity(Tier.DEVICE)
        budget = self._budget
        if budget.device_bytes > total:
            budget = Budget(total, budget.host_bytes, budget.disk_bytes)
        self._refuse_infeasible(module, (args, kwargs), hardware, budget)
        self._carrier = Carrier(
            device,
            host_budget=budget.host_bytes,
            disk_budget=budget.disk_bytes,
            spill_dir=limits.spill_dir,
        )
        self._restore = enforce(device, budget.device_bytes)
        policy = Policy(limits.policy, budget, limits.exact)
        self._conductor = Conductor(policy, hardware, self._carrier, self._models)
        return self._conductor

    def _refuse_infeasible(
        self, module: torch.nn.Module, call: Any, hardware: HardwareProfile, budget: Budget
    ) -> None:
        """Raise before anything runs if the budget cannot hold even one pass.

        Without optimizer state: what is not known to exist must not refuse a budget. The smallest
        budget that the error names allows for two copies, as Adam keeps them.
        """
        device = torch.device(hardware.device)
        limits = self._limits
        self._tracing = True
        try:
            trace = static_trace(module, call, device, state_copies=0)
            try:
                make_plan(limits.policy, trace, hardware, budget, exact=limits.exact)
            except InfeasibleBudgetError:
                trace = static_trace(module, call, device, state_copies=2)
                make_plan(limits.policy, trace, hardware, budget, exact=limits.exact)
        except TraceError:
            # It can be traced by running it alone; then the cap is the judge.
            return
        finally:
            self._tracing = False


def _device_of(module: torch.nn.Module) -> torch.device:
    tensor = next(module.parameters(), None)
    if tensor is None:
        tensor = next(module.buffers(), None)
    device = tensor.device if tensor is not None else torch.get_default_device()
    if device.type not in ("cpu", "cuda"):
        raise BudgetError(f"belady manages CPU and CUDA memory, not {device.type}")
    return torch.device(device.type, device.index or 0) if device.type == "cuda" else device
