"""A workload in the hands of a method: a peer's under torch's own cap, or ours under a budget."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

import belady
from belady.errors import InfeasibleBudgetError
from belady.ir.plan import Budget
from belady.ir.run import Run
from belady.ir.timeline import Measured
from belady.ir.trace import Tier
from belady.measure.corrections import roomiest
from belady.planners import plan, smallest_budget
from belady.simulate.blocks import in_blocks
from benchmarks.average import held_on_average
from benchmarks.bounds import bound_of_own
from benchmarks.cases import ENGINES, OURS, OWN, Record
from benchmarks.copies import lane_rates
from benchmarks.levels import in_turn
from benchmarks.memory import going_back
from benchmarks.peers import PEERS, Applied, Peer
from benchmarks.workloads import Workload

# Iterations before timing starts: of peers, and at most of ours (observed, planned, verified).
WARM_UP, WARM_UP_MOST = 5, 24
Attempt = Callable[[Callable[[], torch.Tensor]], torch.Tensor]
_UNLIMITED = "1TiB"
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True)
class Session:
    """A workload that a method has in hand.

    Attributes
    ----------
    settled
        Whether, after so many iterations, the next ones are like it.
    extras
        What the method itself knows of the iterations, once they are over.
    own_peak
        Bytes at the peak by the method's own count, where nobody else can count op by op: Dynamo
        captures nothing under a dispatch mode.
    phases
        Of the iterations so far, but for the last one or two, which are told of later.
    attempt
        Runs forward and backward in the warm-up: again where memory ran out and the method can.
    """

    work: Workload
    applied: Applied
    settled: Callable[[int], bool]
    extras: Callable[[], Record]
    own_peak: Callable[[], int] | None = None
    phases: Callable[[], Sequence[str]] = tuple
    attempt: Attempt = operator.call

    def iterate(self, count: int, attempt: Attempt = operator.call) -> list[float]:
        """Run iterations and wait for the device once, at the end."""
        losses = [self._step(attempt).detach() for _ in range(count)]
        return [loss.item() for loss in losses]

    def warm_up(self, enough: Callable[[], bool] = lambda: False) -> Record:
        """Iterate until it is settled; gives how long that took.

        Parameters
        ----------
        enough
            Asked after each iteration: whether that will do.
        """
        begun = time.perf_counter()
        self.iterate(1, self.attempt)
        record: Record = {"first_iteration_seconds": time.perf_counter() - begun}
        count = 1
        while not (enough() or self.settled(count)):
            self.iterate(1, self.attempt)
            count += 1
        return record | {"warm_up": count, "warm_up_seconds": time.perf_counter() - begun}

    def backward(self) -> torch.Tensor:
        """Forward, loss and backward of one batch; gives the loss."""
        arguments, loss_of = next(self.work.batches)
        around = self.applied.around()
        with around if self.applied.backward_inside else nullcontext():
            with (
                self.work.setting.autocast(),
                nullcontext() if self.applied.backward_inside else around,
            ):
                loss = loss_of(self.applied.model(*arguments))
            loss.backward()
        return loss

    def _step(self, attempt: Attempt) -> torch.Tensor:
        loss = attempt(self.backward)
        self.work.optimizer.step()
        self.work.optimizer.zero_grad()
        return loss


# Opens a session in which the method may hold so many bytes; None is all there are.
Opener = Callable[[int | None], AbstractContextManager[Session]]


@contextmanager
def opened(work: Workload, method: str) -> Iterator[Opener]:
    """Put ``work`` into the hands of ``method``; gives what opens a session under a cap.

    A peer is applied once for all sessions, so that compiled code is compiled once, unless it says
    otherwise; ours plans anew in each.
    """
    if method.startswith(OWN):
        yield lambda cap: _ours(work, method, cap)
        return
    peer = PEERS[method]
    if peer.anew:
        yield lambda cap: _peer_anew(work, peer, cap)
        return
    with peer.applied(work) as applied:
        yield lambda cap: _peer(work, applied, cap)


def available(work: Workload, method: str) -> str | None:
    """Why ``method`` cannot run ``work`` on this machine."""
    if method.startswith(OWN):
        return None
    if method not in PEERS:
        raise ValueError(
            f"no method {method!r}: POLICY after one of {', '.join(OWN)} or one of "
            f"{', '.join(PEERS)}"
        )
    return PEERS[method].available(work)


def observed(work: Workload) -> Run:
    """What belady knows of the workload, without a cap, once it has verified a plan.

    Only then are the host's seconds those of iterations that nothing watches.
    """
    with _virtual(work, OURS + "hybrid", None) as (vm, session):
        session.warm_up()
        run = vm.run()
    if run is None:
        raise RuntimeError("no plan after the warm-up")
    return run


def _plain(work: Workload) -> Session:
    return Session(work, Applied(work.model), lambda count: count >= WARM_UP, dict)


@contextmanager
def _peer(work: Workload, applied: Applied, cap: int | None) -> Iterator[Session]:
    with _capped(work.setting.device, cap):
        yield Session(work, applied, lambda count: count >= WARM_UP, dict)


@contextmanager
def _peer_anew(work: Workload, peer: Peer, cap: int | None) -> Iterator[Session]:
    with peer.applied(work) as applied, _peer(work, applied, cap) as session:
        yield session


@contextmanager
def _capped(device: str, cap: int | None) -> Iterator[None]:
    """Torch's own cap, with the allocator set as belady sets it under a budget."""
    if cap is None or device != "cuda":
        yield
        return
    configured = any(os.environ.get(name) for name in _VARIABLES)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    try:
        if not configured:
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total))
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        if not configured:
            torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@contextmanager
def _ours(work: Workload, method: str, cap: int | None) -> Iterator[Session]:
    cuda = work.setting.device == "cuda"
    with _virtual(work, method, cap) as (vm, session):

        def facts() -> Record:
            # Recorded after all that is timed: what each copy took.
            vm.record()
            begun = time.perf_counter()
            session.iterate(1)
            every = {"every_event_seconds": time.perf_counter() - begun}
            known = _of_run(vm, method.partition(":")[2]) | every
            return known | (in_turn(vm, session.iterate) if cuda else {})

        yield replace(session, extras=facts)


@contextmanager
def _virtual(
    work: Workload, method: str, cap: int | None
) -> Iterator[tuple[belady.VirtualMemory, Session]]:
    ours, colon, policy = method.partition(":")
    engine, budget = ENGINES[ours + colon], _UNLIMITED if cap is None else cap
    phases: list[str] = []

    def settled(count: int) -> bool:
        # Listeners are told one iteration late.
        return count >= WARM_UP_MOST or phases[-1:] == ["steady"]

    with belady.virtualize(work.model, budget, policy=policy, engine=engine) as vm:
        vm.listeners.append(lambda stats: phases.append(stats.phase))
        own_peak = None if engine == ENGINES[OURS] else partial(_own_peak, vm)
        applied, again = Applied(work.model), partial(going_back, vm, work)
        yield vm, Session(work, applied, settled, dict, own_peak, lambda: phases, again)


def _own_peak(vm: belady.VirtualMemory) -> int:
    run = vm.run()
    if run is None or run.measured is None:
        raise RuntimeError("no plan was verified, and so no peak is known")
    return run.measured.peak(Tier.DEVICE)


def _of_run(vm: belady.VirtualMemory, policy: str) -> Record:
    """What the Run knows: plan, prediction, verified measurement."""
    run = vm.run()
    if run is None:
        return {}
    begun = time.perf_counter()
    # A floor that goes on without the stated margin is no plan of any policy.
    with suppress(InfeasibleBudgetError):
        plan(policy, run.trace, run.hardware, run.plan.budget)
    planning = time.perf_counter() - begun
    record: Record = {
        "planner": run.plan.planner,
        "numerics": list(run.plan.numerics),
        "planning_seconds": planning,
        "moved_values": len(run.plan.decisions),
        "predicted_peak_bytes": run.predicted.peak(Tier.DEVICE),
        "predicted_reserved_bytes": in_blocks(run.trace, run.plan, run.hardware.allocator).nbytes,
        "predicted_seconds": run.predicted.seconds,
        "predicted_stall_seconds": run.predicted.stall_seconds,
        "kernel_seconds": run.predicted.compute_seconds,
        "host_seconds": sum(op.host_seconds for op in run.trace.ops),
        "workspace_bytes": max((op.workspace_bytes for op in run.trace.ops), default=0),
        "ops": len(run.trace.ops),
        "margin": [run.hardware.allocator.margin_fraction, run.hardware.allocator.margin_bytes],
        "links": [
            [link.source, link.target, link.bytes_per_s, link.duplex_bytes_per_s]
            for link in run.hardware.links
        ],
        "largest_bytes": max((s.nbytes for s in run.trace.storages), default=0),
        "notes": list(run.notes),
        **held_on_average(run),
        **bound_of_own(run),
    }
    return record | _of_measured(run, policy)


def _of_measured(run: Run, policy: str) -> Record:
    """What was measured of iterations under the plan."""
    measured = run.measured
    if measured is None:
        return {}
    record: Record = {
        "verified_peak_bytes": measured.peak(Tier.DEVICE),
        "verified_reserved_bytes": measured.reserved_bytes,
        "verified_seconds": list(measured.iterations),
        "host_bytes": measured.peak(Tier.HOST),
        "disk_bytes": measured.peak(Tier.DISK),
        "stall_seconds": None if measured.launched else measured.stall_seconds,
        "moved": [[m.lane, m.nbytes, m.copies] for m in measured.moved],
        "defaults": list(measured.defaults),
        "lanes": lane_rates(run, measured.spans),
    }
    if measured.launched:
        # Launches take nothing from torch's allocator: it counted them when they were captured.
        record["peak_allocated_bytes"] = measured.peak(Tier.DEVICE)
        record["peak_source"] = "torch's allocator while it was captured"
    if measured.allocation_retries:
        record["wider_bytes"] = _wider(run, policy, measured)
    return record


def _wider(run: Run, policy: str, measured: Measured) -> int:
    """The smallest budget that leaves the margin which an iteration has asked for."""
    asked = roomiest(run.trace, run.plan, run.hardware.allocator, measured)
    hardware = replace(run.hardware, allocator=asked)
    return smallest_budget(policy, run.trace, hardware, Budget(2**62))
