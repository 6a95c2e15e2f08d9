"""`virtualize`: train a model within a budget of device memory; nothing else changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from belady._version import __version__
from belady.eager.attempts import attempt
from belady.eager.conductor import Conductor
from belady.eager.limits import Limits, open_machine
from belady.eager.tracker import Tracker
from belady.errors import ReplayError
from belady.forwards import demand_python
from belady.ir.hardware import HardwareProfile
from belady.ir.run import Run
from belady.measure.stages import Policy
from belady.measure.starving import out_of_memory
from belady.measure.stats import IterationStats, Listeners
from belady.memory.carrier import Carrier
from belady.owners import taken
from belady.planners import traits_of

if TYPE_CHECKING:
    from belady.graph.roots import Roots
    from belady.graph.session import Session

_Opened = TypeVar("_Opened", "Conductor", "Session")
_Result = TypeVar("_Result")


def virtualize(
    models: torch.nn.Module | Sequence[torch.nn.Module],
    budget: object,
    *,
    policy: str = "auto",
    host_budget: object = None,
    disk_budget: object = None,
    spill_dir: str | None = None,
    exact: bool = False,
    engine: str = "eager",
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
        ``"auto"``, ``"hybrid"``, ``"hybrid_cheap"``, ``"lifetime"``, ``"vdnn_all"``,
        ``"vdnn_conv"``, ``"vdnn_dyn"``, ``"tvdnn_ilp"``, ``"tvdnn_greedy"``,
        ``"layrub_hybrid"``, ``"layrub_inter"``, ``"layrub_intra"``, ``"ocdnn_naive"``,
        ``"ocdnn_opt"``, ``"floor"`` or ``"baseline"``.
    host_budget, disk_budget
        Most bytes of pinned host memory and of disk; None is what the machine has.
    spill_dir
        Folder on a disk for spilled bytes; None is the system's folder for temporary files.
    exact
        Forbid every decision that can change a bit of the result.
    engine
        ``"eager"``: hooks, for any PyTorch code. ``"graph"``: what `torch.compile` can capture of
        the models runs as graphs whose ops are moved and repeated one by one; the rest of them
        runs as plain PyTorch, unmanaged, or with hooks if nothing was captured of any root, and
        the report says which parts. ``"inductor"``: the same, with Inductor's kernels between
        movements; they can change bits. ``"auto"``:
        ``"graph"`` if the first call of every root can be captured as a whole, or else ``"eager"``.

    Returns
    -------
    VirtualMemory
        Also a context manager; `VirtualMemory.close` leaves everything as it was found.

    Raises
    ------
    BudgetError
        If a budget cannot be read.
    ValueError
        If the policy or the engine is unknown, or the two do not go together, or a module is
        TorchScript's, cannot be captured, or is managed by another `VirtualMemory`.
    TypeError
        If ``models`` holds anything but modules.

    Notes
    -----
    An iteration ends at the optimizer's step. The first two of each kind run at the floor, where
    everything that can move does, and are observed; they are slow. A budget that no plan can keep
    is refused with `InfeasibleBudgetError` inside the first call, before anything runs.
    """
    limits = Limits(budget, host_budget, disk_budget, spill_dir, policy, exact, engine)
    if isinstance(models, torch.nn.Module) or not isinstance(models, Iterable):
        models = [models]
    return VirtualMemory(list(models), limits)


class VirtualMemory:
    """The memory of one or several models under a budget.

    Attributes
    ----------
    listeners
        Called with `IterationStats` of every iteration, one iteration late, so that reading its
        duration does not make the host wait for the device.
    """

    def __init__(self, models: Sequence[torch.nn.Module], limits: Limits) -> None:
        self._limits = limits
        budget = limits.budgets()
        limits.demand_known()
        self._machine: tuple[Policy, HardwareProfile, Carrier] | None = None
        self._notes: list[str] = []
        self._stats = Listeners(budget.device_bytes)
        self.listeners: list[Callable[[IterationStats], None]] = self._stats.all
        self._tracker = self._engine()
        self._recorded = False
        # What outlives this object unless it is undone: also when it is dropped without `close`.
        self._undo = ExitStack()
        self._finalizer = weakref.finalize(self, self._undo.close)
        try:
            for model in models:
                self.add(model)
        except BaseException:
            self.close()
            raise

    def add(self, module: torch.nn.Module) -> None:
        """Make ``module`` a root, from its next call on.

        Raises
        ------
        TypeError
            If it is no module.
        ValueError
            If it is TorchScript's, the engine cannot capture it, or another `VirtualMemory`
            manages it.
        """
        demand_python(module)
        with taken(module, self._finalizer):
            try:
                self._tracker.add(module)
            except ValueError as error:
                if self._limits.engine != "auto":
                    raise
                self._go_eager(str(error)).add(module)

    def iteration(self) -> AbstractContextManager[None]:
        """Make a block one iteration, and manage what a loss saves outside the roots too.

        All that is saved from the first call of a root to the end of the block is managed.

        Raises
        ------
        RuntimeError
            If it is entered inside itself or inside a forward.
        """
        return self._tracker.whole()

    def step(self, closure: Callable[[], _Result]) -> _Result:
        """Run forward and backward such that they can be run again, and give what they give.

        Where the device runs out of memory in ``closure``, its gradients, the models' buffers and
        the random states (torch's, Python's and NumPy's global ones) are put back, a plan with a
        wider margin is put in force, or the floor, and ``closure`` is called again, up to three
        times. Then call the optimizer's step.

        Parameters
        ----------
        closure
            Calls the models and ``backward``. It has no other effect than their gradients and
            buffers and random numbers (nothing else is put back), and does not step an optimizer.

        Raises
        ------
        OutOfMemoryError
            If there was not enough memory each time, or ``closure`` changed a parameter.

        Notes
        -----
        Buffers are copied before, and so are gradients that are there already, to the host if they
        are large: accumulate in one closure rather than in several.
        """
        return attempt(closure, lambda: self._tracker)

    def run(self) -> Run | None:
        """Trace, machine, plan, prediction and measurement; None until there is a plan."""
        if self._tracker.conductor is None:
            return None
        versions = (("belady", __version__), ("torch", str(torch.__version__)))
        run = self._tracker.conductor.run(versions)
        return None if run is None else replace(run, notes=(*run.notes, *self._notes))

    def record(self) -> None:
        """Record the next steady iteration, event by event.

        `run` then has the spans, stalls and bytes of it (level 2). Recording waits for the device
        once and takes some microseconds at every save and read of that one iteration.
        """
        self._recorded = True
        if self._tracker.conductor is not None:
            self._tracker.conductor.record()

    def report(self) -> str:
        """Say what moved and why, and what was measured against what was predicted."""
        from belady.report.text import describe

        run = self.run()
        if run is not None:
            return describe(run)
        said = [*self._notes, *self._tracker.said]
        return "\n".join(["belady: no iteration has been planned yet", *said, ""])

    @property
    def verified(self) -> bool | None:
        """Whether measured peaks kept to the budget; None before anything was verified."""
        return None if self._tracker.conductor is None else self._tracker.conductor.verified

    def close(self) -> None:
        """Take everything off the models and give all memory and files back. Idempotent."""
        try:
            self._tracker.close()
        finally:
            self._finalizer()
            # The engine's list too: cycles would keep models until they are collected.
            self._tracker.roots.clear()
        self._stats.tell()

    def __enter__(self) -> VirtualMemory:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            self.close()
        except ReplayError as late:
            if error is None:
                raise
            error.add_note(str(late))
        if isinstance(error, torch.OutOfMemoryError):
            raise out_of_memory(error, self._tracker.conductor) from error

    def _engine(self) -> Tracker | Roots:
        engine, policy = self._limits.engine, self._limits.policy
        if engine == "eager":
            return Tracker(self._conductor, self._stats.ended, cuts=self._limits.cuts)
        if traits_of(policy).managed:
            raise ValueError(
                f"policy {policy!r} moves values in managed memory, which engine={engine!r} does "
                "not: use engine='eager'"
            )
        # Not before it is needed: Dynamo takes a second to load.
        from belady.graph.roots import Roots

        undivided, exact = engine == "auto", self._limits.exact
        return Roots(self._session, self._eagerly, undivided=undivided, exact=exact)

    def _eagerly(self, why: str, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Go on with the eager engine, from a call that is under way."""
        return self._go_eager(why).call(module, args, kwargs)

    def _go_eager(self, why: str) -> Tracker:
        roots, tracker = (
            self._tracker,
            Tracker(self._conductor, self._stats.ended, cuts=self._limits.cuts),
        )
        roots.close()
        self._notes.append(f"engine='eager', since {why}")
        self._tracker = tracker
        for root in roots.roots:
            tracker.add(root)
        return tracker

    def _conductor(self, module: torch.nn.Module) -> Conductor:
        policy, hardware, carrier = self._set_up(module)
        return self._opened(Conductor(policy, hardware, carrier, self._tracker.roots))

    def _session(self, module: torch.nn.Module) -> Session:
        from belady.graph.opening import open_session

        machine, roots = self._set_up(module), self._tracker.roots
        fused = self._limits.engine == "inductor"
        return self._opened(open_session(machine, roots, self._stats.ended, fused=fused))

    def _opened(self, engine: _Opened) -> _Opened:
        self._undo.callback(engine.close)
        if self._recorded:
            engine.record()
        return engine

    def _set_up(self, module: torch.nn.Module) -> tuple[Policy, HardwareProfile, Carrier]:
        """Look at the machine and make the budget real, once."""
        if self._machine is None:
            self._machine = open_machine(module, self._limits, self._undo)
            self._stats.budget_bytes = self._machine[0].budget.device_bytes
        return self._machine
