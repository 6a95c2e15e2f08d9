"""What a user allows, and whether it can be enough."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from belady.errors import BudgetError, InfeasibleBudgetError, TraceError
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Budget
from belady.ir.trace import Tier, Trace
from belady.measure.held import beside, missing_state, with_state
from belady.measure.margins import with_settled
from belady.measure.probe import probe
from belady.measure.stages import Policy
from belady.measure.static import static_trace
from belady.memory.cap import enforce
from belady.memory.carrier import Carrier
from belady.planners import POLICIES, smallest_budget, traits_of
from belady.planners import plan as make_plan
from belady.units import format_bytes, parse_bytes

ENGINES = ("eager", "graph", "inductor", "auto")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a `VirtualMemory` may use, as given."""

    budget: object
    host_budget: object = None
    disk_budget: object = None
    spill_dir: str | None = None
    policy: str = "auto"
    exact: bool = False
    engine: str = "eager"

    @property
    def cuts(self) -> bool:
        """Whether modules may be put in slices."""
        return traits_of(self.policy).slices_modules and not self.exact

    def demand_known(self) -> None:
        """Refuse names that nobody knows, and what does not go together.

        Raises
        ------
        ValueError
            If there is such a thing.
        TypeError
            If ``spill_dir`` is no path.
        """
        if self.spill_dir is not None and not isinstance(self.spill_dir, str | os.PathLike):
            given = type(self.spill_dir).__name__
            raise TypeError(f"spill_dir must be the path of a folder, not {given}")
        if self.policy not in tuple(POLICIES):
            raise ValueError(f"unknown policy {self.policy!r}: one of {', '.join(POLICIES)}")
        if self.engine not in ENGINES:
            raise ValueError(f"unknown engine {self.engine!r}: one of {', '.join(ENGINES)}")
        if self.engine == "inductor" and self.exact:
            raise ValueError("engine='inductor' can change bits, which exact=True forbids")

    def budgets(self) -> Budget:
        """Read the budgets in bytes."""
        host = None if self.host_budget is None else parse_bytes(self.host_budget, "host_budget")
        disk = None if self.disk_budget is None else parse_bytes(self.disk_budget, "disk_budget")
        return Budget(parse_bytes(self.budget), host, disk)

    def policy_for(self, budget: Budget) -> Policy:
        """The policy asked for, within ``budget``."""
        return Policy(self.policy, budget, self.exact)


def open_machine(
    module: torch.nn.Module, limits: Limits, undo: ExitStack
) -> tuple[Policy, HardwareProfile, Carrier]:
    """Look at the machine of ``module`` and make the budget real, until ``undo`` is closed."""
    device = device_of(module)
    hardware = probe(device, spill_dir=limits.spill_dir)
    budget = clamped(limits.budgets(), hardware)
    carrier = Carrier(
        device,
        host_budget=budget.host_bytes,
        disk_budget=budget.disk_bytes,
        spill_dir=limits.spill_dir,
    )
    undo.callback(carrier.close)
    undo.callback(enforce(device, budget.device_bytes))
    return limits.policy_for(budget), hardware, carrier


def clamped(budget: Budget, hardware: HardwareProfile) -> Budget:
    """The budget, but no more of the device than there is."""
    total = hardware.capacity(Tier.DEVICE)
    return replace(budget, device_bytes=min(budget.device_bytes, total))


def foreseen(module: torch.nn.Module, call: tuple[Any, Any], taken: int) -> Trace | None:
    """The static trace of a call; None if only running it can tell, and the cap is the judge.

    Parameters
    ----------
    taken
        Bytes in use before the iteration, see `belady.measure.held.taken_bytes`.
    """
    try:
        return beside(static_trace(module, call, device_of(module)), taken)
    except TraceError:
        return None


def refuse_infeasible(trace: Trace, hardware: HardwareProfile, policy: Policy) -> None:
    """Raise before anything runs if the budget cannot hold even one pass.

    It is judged without the optimizer state that is not there yet: what is not known to exist must
    not refuse a budget. The smallest budget that the error names allows for two copies, as Adam
    keeps them.

    Parameters
    ----------
    trace
        Static.

    Raises
    ------
    InfeasibleBudgetError
        If no plan of the policy fits.
    """
    try:
        _plan(trace, hardware, policy)
    except InfeasibleBudgetError as error:
        stateless = error.smallest_bytes
    else:
        return
    try:
        _plan(with_state(trace, 2), hardware, policy)
    except InfeasibleBudgetError as error:
        if error.smallest_bytes > stateless:
            error.add_note(
                f"{format_bytes(error.smallest_bytes)} have room for an optimizer's state as large "
                f"as Adam's, since it is not known yet; without any {format_bytes(stateless)} do"
            )
        raise


def _plan(trace: Trace, hardware: HardwareProfile, policy: Policy) -> None:
    hardware = with_settled(trace, hardware, policy.name)
    make_plan(policy.name, trace, hardware, policy.budget, exact=policy.exact)


def least_with_state(trace: Trace, hardware: HardwareProfile, policy: Policy) -> int:
    """Smallest budget of the floor with two copies of all that is trained, as Adam keeps them.

    Parameters
    ----------
    trace
        Static, of one pass.
    """
    allocator = hardware.allocator
    floor = allocator.peak_within(smallest_budget("floor", trace, hardware, policy.budget))
    return allocator.budget_for(floor + missing_state(trace, 2))


def device_of(module: torch.nn.Module) -> torch.device:
    """The device of the module's first parameter or buffer, with its index.

    Raises
    ------
    BudgetError
        If it is neither a CPU nor a CUDA device.
    """
    tensors = (*module.parameters(), *module.buffers())
    device = tensors[0].device if tensors else torch.get_default_device()
    if device.type not in ("cpu", "cuda"):
        raise BudgetError(f"belady manages CPU and CUDA memory, not {device.type}")
    return torch.device(device.type, device.index or 0) if device.type == "cuda" else device
