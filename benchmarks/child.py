"""The process that measures: cases of one workload in, a JSON line for each out.

``python -m benchmarks.child`` reads ``{"cases": […], "references": {…}, "bases": {…}}`` from a line
of its input, and ends where the input does: whoever asked is gone then, however that came. Plain's
losses and gradients, which equality is judged by, are taken from ``references`` or worked out here
first, and then told in the record. ``bases`` are what budgets are shares of. What it is at, as a
case can take minutes, it tells on its stderr.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from dataclasses import dataclass, field, replace
from importlib import import_module

import torch

import belady
from belady.errors import MissingExtraError
from belady.ir.hardware import Allocator
from belady.ir.plan import Budget
from belady.ir.run import Run
from belady.planners import smallest_budget
from belady.units import parse_bytes
from benchmarks.bounds import bounded
from benchmarks.cases import BOUND, FOUND, LOST, OWN, Case, Record, from_json
from benchmarks.equality import equality
from benchmarks.measure import kept, pace, settled_peak, timed
from benchmarks.memory import starved, tidy, too_little
from benchmarks.methods import Opener, available, observed, opened
from benchmarks.peers import PEERS
from benchmarks.provenance import provenance
from benchmarks.records import RESULTS
from benchmarks.smallest import smallest_cap
from benchmarks.trials import STEADY, trial
from benchmarks.workloads import WORKLOADS, Setting, Workload

_CAP_STEP = 1.02  # by which a cap grows that held in its trial and not in the measurement
_OWN_STEP = 1.01
_ERROR_END = 1500


class AbsentError(Exception):
    """The workload or the method is not there on this machine."""


@dataclass
class Known:
    """What cases of one process learn from one another.

    Attributes
    ----------
    references
        Plain's losses and gradients, by `Case.reference`.
    bases
        Smallest caps and plain's peak in bytes, by `Case.base`.
    observed
        What a floor run showed, by `Case.together`.
    """

    references: dict[str, Record]
    bases: dict[str, int] = field(default_factory=dict)
    observed: dict[str, Run] = field(default_factory=dict)


def main() -> None:
    """Measure the cases that the input names."""
    # Ctrl-C is for whoever asked, who then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("belady").setLevel(logging.INFO)
    given = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with, args=(sys.stdin.fileno(),), daemon=True).start()
    known = Known(given.get("references", {}), given.get("bases", {}))
    cases = [from_json(entry) for entry in given["cases"]]
    if all(case.toy for case in cases):
        _freeze()
    for case in cases:
        begun = time.perf_counter()
        record = case.as_json() | provenance(case.device) | _outcome(case, known)
        record["wall_seconds"] = time.perf_counter() - begun
        print(json.dumps(record), flush=True)
        if record["outcome"] == "crash" and "CUDA error" in record["error"]:
            # The context is lost with it; the caller goes on in a new process.
            sys.exit(LOST)


def _freeze() -> None:
    """Have the collector pass over what torch has loaded, all that takes time where nets are small.

    Where seconds are measured it is as slow as in anybody's program.
    """
    import_module("torch._dynamo")  # which the first optimizer loads
    gc.collect()
    gc.freeze()


def _end_with(descriptor: int) -> None:
    """End this process when its input ends, whatever it is at."""
    # Not by `sys.stdin`, whose lock a thread that waits for input would hold at exit.
    while os.read(descriptor, 1 << 16):
        pass
    os._exit(1)


def _outcome(case: Case, known: Known) -> Record:
    """Whatever happens is a result."""
    try:
        record = {"outcome": "ok"} | _Bench(case, known).run()
        if case.name == case.plain:
            # For those that share this process.
            known.bases[case.plain] = record["peak_allocated_bytes"]
        return record
    except AbsentError as error:
        return {"outcome": "absent", "error": str(error)}
    except belady.InfeasibleBudgetError as error:
        tidy(None, error)
        smallest = error.smallest_bytes
        told = {"error": str(error)[:300], "reasons": getattr(error, "__notes__", [])}
        return {"outcome": "infeasible", "smallest_bytes": smallest, **told}
    except Exception as error:
        tidy(None, error)
        if starved(error):
            return {"outcome": "out of memory", "error": str(error)[:300]}
        # Where the checkout and packages lie says nothing.
        text = traceback.format_exc().replace(f"{RESULTS.parents[1]}/", "")
        text = text.replace(f"{sysconfig.get_path('purelib')}/", "")
        return {"outcome": "crash", "error": text[-_ERROR_END:]}


class _Bench:
    """One case under way."""

    def __init__(self, case: Case, known: Known) -> None:
        self.case = case
        self._known = known
        self._setting = Setting(
            case.precision, case.channels_last, case.device, case.cudnn_benchmark
        )
        self._setting.apply()
        self._pace = pace()

    def run(self) -> Record:
        """Measure time and peaks, then equality, each on a workload made anew; or find a cap."""
        tidy(None)  # what the case before has left in cycles would count as the user's own
        if self.case.method == BOUND:
            return self._bound()
        ours = self.case.method.startswith(OWN)
        if not ours and (absent := available(self._make(), self.case.method)) is not None:
            raise AbsentError(absent)
        tidy(None)
        known = self._known.bases.get(self.case.cap_of(self.case.method))
        searched = self.case.budget == "smallest" and known is None
        if searched and ours:
            self._observed()
        # Before the workload is made: one that has run has an optimizer's state, between holes.
        cap = None if searched else self._cap()
        work = self._make()
        with opened(work, self.case.method) as opener:
            if searched:
                return self._smallest(work, opener) | {"outcome": FOUND}
            record = self._measured(work, opener, cap)
        if self.case.method in PEERS:
            record["source"] = PEERS[self.case.method].source
        del work, opener
        if self.case.equal_steps:
            tidy(None)
            cap = record.get("budget_bytes", cap)
            record |= equality(self.case, self._make, self._known.references, cap)
        return record

    def _make(self) -> Workload:
        case = self.case
        if case.workload not in WORKLOADS:
            raise ValueError(f"no workload {case.workload!r}: one of {', '.join(WORKLOADS)}")
        try:
            return WORKLOADS[case.workload].make(
                self._setting, dict(case.sizes), case.toy, case.seed
            )
        except ImportError as error:
            raise AbsentError(f"{case.workload}: {error}") from error

    def _bound(self) -> Record:
        """What no plan can beat within the budget, even if nothing is lost between blocks.

        A figure of the simulator, of kernels as fast as an iteration without a cap shows them.
        """
        run = self._observed()
        cap = self._cap()
        begun = time.perf_counter()
        try:
            found = bounded(run, Budget(2**62 if cap is None else cap))
        except MissingExtraError as error:
            raise AbsentError(str(error)) from error
        return {
            "budget_bytes": cap,
            "bound_seconds": found.seconds if found.feasible else None,
            "bound_status": found.status,
            "bound_needed_bytes": found.needed_bytes,
            "planning_seconds": time.perf_counter() - begun,
        }

    def _observed(self) -> Run:
        name = self.case.together
        if name not in self._known.observed:
            self._known.observed[name] = observed(self._make())
            tidy(None)
        return self._known.observed[name]

    def _own(self) -> int:
        """Smallest budget that a policy states, and 1 % as workspaces vary from run to run."""
        if not self.case.method.startswith(OWN):
            raise ValueError(f"{self.case.method} states no budget of its own")
        # The founders' policies ask for a margin on everything.
        allocator = replace(self._observed().hardware.allocator, settled_bytes=0)
        return int(_OWN_STEP * self._stated(allocator))

    def _stated(self, allocator: Allocator) -> int:
        """Smallest budget that the policy states, with an allocator that loses so much."""
        run, policy = self._observed(), self.case.method.partition(":")[2]
        hardware = replace(run.hardware, allocator=allocator)
        return smallest_budget(policy, run.trace, hardware, Budget(2**62))

    def _cap(self) -> int | None:
        """Bytes of the case's budget."""
        budget = self.case.budget
        if budget == "none":
            return None
        if budget == "own":
            return self._own()
        if budget == "smallest":
            return self._known.bases[self.case.cap_of(self.case.method)]
        if self.case.base:
            return int(self._known.bases[self.case.base] * self.case.share)
        return parse_bytes(budget)

    def _smallest(self, work: Workload, opener: Opener) -> Record:
        if self.case.method.startswith(OWN):
            high = self._own()
            # With nothing lost between blocks: near what does, unless slices lower it.
            allocator = self._observed().hardware.allocator
            guesses = [high, self._stated(replace(allocator, margin_fraction=0.0, margin_bytes=0))]
            # A cap in which all but large workspaces fit can fail, and a smaller one pass, in which
            # slices leave room for them. So what a peer passes is asked first.
            caps = (self._known.bases.get(self.case.cap_of(name)) for name in PEERS)
            guesses = [*sorted(it for it in caps if it is not None and it < high)[:1], *guesses]
        else:
            with opener(None) as it:
                it.warm_up()
                free = settled_peak(it, STEADY)
            peak = int(free["peak_allocated_bytes"])
            high = int(free.get("peak_reserved_bytes", peak))
            guesses = [int(peak * 1.02), int(peak * 0.98)]
        tidy(work)
        held = [tensor.untyped_storage() for tensor in work.persistent_tensors()]
        low = sum({storage._cdata: storage.nbytes() for storage in held}.values())
        found = smallest_cap(lambda cap: trial(work, opener, cap), low, high, guesses)
        trials = [[trial.cap_bytes, trial.failed] for trial in found.trials]
        if not found.high:
            raise torch.OutOfMemoryError(f"no cap passed: {trials}")
        return {"budget_bytes": found.high, "trials": trials}

    def _measured(self, work: Workload, opener: Opener, cap: int | None) -> Record:
        """Time and peaks; a cap may grow by a few steps.

        One that was found by trials by a little; ours states a wider margin, and so a larger
        budget, where the first made the allocator flush its cache.
        """
        caps, grows = [cap], self.case.budget in ("smallest", "own")
        for last in (False, False, True) if grows else (True,):
            record: Record = {}
            try:
                with opener(cap) as it:
                    record = it.warm_up() | timed(it, self.case.repeats, [self._pace])
                    record |= it.extras()
                if last or kept(record, cap):
                    break
            except Exception as error:
                if last or not too_little(error):
                    raise
                tidy(work, error)
            cap = max(int((cap or 0) * _CAP_STEP), record.get("wider_bytes", 0))
            caps.append(cap)
        tidy(work)
        return record | ({} if cap is None else {"budget_bytes": cap, "caps": caps})


if __name__ == "__main__":
    main()
