"""Models whose captured graphs run under a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from belady._version import __version__
from belady.graph.capture import backend_of
from belady.graph.session import Session
from belady.ir.plan import Budget
from belady.ir.run import Run
from belady.measure.probe import probe
from belady.measure.stages import Policy
from belady.memory.cap import enforce
from belady.memory.carrier import Carrier
from belady.memory.lanes import resolve


def compiled(
    models: torch.nn.Module | Sequence[torch.nn.Module],
    budget_bytes: int,
    *,
    policy: str = "hybrid",
    host_bytes: int | None = None,
    disk_bytes: int | None = None,
    spill_dir: str | None = None,
) -> Compiled:
    """Compile models so that what their graphs save keeps within a budget of device memory.

    Parameters
    ----------
    models
        A module or several, which share one plan: also the blocks of a larger one.
    budget_bytes, host_bytes, disk_bytes
        Most bytes of each tier; None is what the machine has.
    policy
        A name in `belady.planners.POLICIES`.
    spill_dir
        Folder on a disk for spilled bytes; None is the system's folder for temporary files.

    Notes
    -----
    A budget that no plan can keep is refused with `InfeasibleBudgetError` inside a call, before
    anything of it runs.
    """
    given = [models] if isinstance(models, torch.nn.Module) else list(models)
    return Compiled(given, Policy(policy, Budget(budget_bytes, host_bytes, disk_bytes)), spill_dir)


class Compiled:
    """Compiled models; call them as the models themselves.

    Attributes
    ----------
    models
        The compiled models, in the order given. The models given were not touched.
    session
        Decides how their graphs run.
    """

    def __init__(
        self, models: Sequence[torch.nn.Module], policy: Policy, spill_dir: str | None
    ) -> None:
        device = _device_of(models)
        hardware = probe(device, spill_dir=spill_dir)
        budget = policy.budget
        self._undo = ExitStack()
        carrier = Carrier(
            device,
            host_budget=budget.host_bytes,
            disk_budget=budget.disk_bytes,
            spill_dir=spill_dir,
        )
        self._undo.callback(carrier.close)
        self._undo.callback(enforce(device, budget.device_bytes))
        self.session = Session(models, policy, hardware, carrier)
        backend: Any = backend_of(self.session)
        # A size that changes gets a graph and a plan of its own.
        self.models: list[Any] = [
            torch.compile(model, backend=backend, dynamic=False) for model in models
        ]

    def run(self) -> Run | None:
        """Trace, machine, plan, prediction and measurement; None until there is a plan."""
        versions: Mapping[str, str] = {"belady": __version__, "torch": str(torch.__version__)}
        return self.session.run(tuple(versions.items()))

    def close(self) -> None:
        """Give all memory and files back. Idempotent.

        What the models saved before is lost; they can still be called, and save on the device.
        """
        self.session.close()
        self._undo.close()

    def __enter__(self) -> Compiled:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _device_of(models: Iterable[torch.nn.Module]) -> torch.device:
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            return resolve(tensor.device)
    return torch.device("cpu")
