"""The process that measures: cases of one workload in, a JSON line for each out.

``python -m benchmarks.child`` reads ``{"cases": […], "references": {…}}`` from its input. Plain's
losses and gradients, which equality is judged by, are taken from ``references`` or worked out here
first, and then told in the record.
"""

from __future__ import annotations

import json
import sys
import time
import traceback

import torch

import belady
from belady.units import parse_bytes
from benchmarks.cases import OURS, Case, Record, from_json
from benchmarks.measure import digest, settled_peak, timed, versions
from benchmarks.methods import OutOfMemory, available, own_budget, session, tidy
from benchmarks.smallest import smallest_cap
from benchmarks.workloads import WORKLOADS, Setting, Workload

_STEADY = 4  # iterations in which a cap must hold without a retry
_CAP_STEP = 1.02  # by which a cap grows that held in its trial and not in the measurement
_ERROR_END = 1500


class AbsentError(Exception):
    """The workload or the method is not there on this machine."""


def main() -> None:
    """Measure the cases that the input names."""
    given = json.load(sys.stdin)
    references: dict[str, Record] = dict(given.get("references", {}))
    for entry in given["cases"]:
        case = from_json(entry)
        begun = time.perf_counter()
        record = case.as_json() | versions(case.device) | _outcome(case, references)
        record["wall_seconds"] = time.perf_counter() - begun
        print(json.dumps(record), flush=True)


def _outcome(case: Case, references: dict[str, Record]) -> Record:
    """Whatever happens is a result."""
    try:
        record = _Bench(case, references).run() | {"outcome": "ok"}
    except AbsentError as error:
        record = {"outcome": "absent", "error": str(error)}
    except OutOfMemory as error:
        record = {"outcome": "out of memory", "error": str(error)[:300]}
        tidy(None, error)
    except belady.InfeasibleBudgetError as error:
        record = {
            "outcome": "infeasible",
            "error": str(error)[:300],
            "smallest_bytes": error.smallest_bytes,
        }
        tidy(None, error)
    except Exception as error:
        record = {"outcome": "crash", "error": traceback.format_exc()[-_ERROR_END:]}
        tidy(None, error)
    return record


class _Bench:
    """One case under way."""

    def __init__(self, case: Case, references: dict[str, Record]) -> None:
        self.case = case
        self._references = references
        self._setting = Setting(
            case.precision, case.channels_last, case.device, case.cudnn_benchmark
        )
        self._setting.apply()

    def run(self) -> Record:
        """Measure time and peaks, then equality, each on a workload made anew."""
        work = self._make()
        absent = available(work, self.case.method)
        if absent is not None:
            raise AbsentError(absent)
        cap, record = self._cap(work)
        record |= self._measured(work, cap)
        del work
        if self.case.equal_steps:
            tidy(None)
            record |= self._equality(record.get("budget_bytes"))
        return record

    def _make(self) -> Workload:
        case = self.case
        try:
            return WORKLOADS[case.workload].make(
                self._setting, dict(case.sizes), case.toy, case.seed
            )
        except ImportError as error:
            raise AbsentError(f"{case.workload}: {error}") from error

    def _cap(self, work: Workload) -> tuple[int | None, Record]:
        """Bytes of the case's budget, and how they were found."""
        budget, method = self.case.budget, self.case.method
        if budget == "none":
            return None, {}
        if budget == "own":
            return own_budget(work, method), {}
        if budget == "smallest":
            return self._smallest(work)
        if budget.endswith("%"):
            with session(work, "plain", None) as it:
                it.warm_up()
                peak = int(settled_peak(it, _STEADY)["peak_allocated_bytes"])
            tidy(work)
            return int(peak * float(budget[:-1]) / 100), {"plain_peak_bytes": peak}
        return parse_bytes(budget), {}

    def _smallest(self, work: Workload) -> tuple[int | None, Record]:
        method = self.case.method
        if method.startswith(OURS):
            high = own_budget(work, method)
            guesses = [high]
        else:
            with session(work, method, None) as it:
                it.warm_up()
                free = settled_peak(it, _STEADY)
            peak = int(free["peak_allocated_bytes"])
            high = int(free.get("peak_reserved_bytes", peak))
            guesses = [int(peak * 1.02), int(peak * 0.98)]
        tidy(work)
        low = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes()
                   for t in work.persistent_tensors()}.values())  # fmt: skip
        found = smallest_cap(lambda cap: _trial(work, method, cap), low, high, guesses)
        record: Record = {"trials": [[t.cap_bytes, t.failed] for t in found.trials]}
        if not found.high:
            raise torch.OutOfMemoryError(f"no cap passed: {record['trials']}")
        return found.high, record

    def _measured(self, work: Workload, cap: int | None) -> Record:
        """Time and peaks; a cap that was found by trials may grow by a few steps."""
        searched = self.case.budget == "smallest"
        for last in (False, False, True) if searched else (True,):
            try:
                with session(work, self.case.method, cap) as it:
                    record = it.warm_up() | timed(it, self.case.repeats)
                    record |= it.extras()
                if last or _kept(record, cap):
                    break
            except (*OutOfMemory, belady.InfeasibleBudgetError) as error:
                if last:
                    raise
                tidy(work, error)
            cap = int((cap or 0) * _CAP_STEP)
        tidy(work)
        return record | ({} if cap is None else {"budget_bytes": cap})

    def _equality(self, cap: int | None) -> Record:
        key = self.case.reference
        record: Record = {}
        if key not in self._references:
            first, second = (self._digest("plain", None) for _ in range(2))
            self._references[key] = {"plain_digest": first, "plain_repeats": first == second}
        plain = self._references[key]
        try:
            record["digest"] = self._digest_of_method(cap)
        except (*OutOfMemory, belady.InfeasibleBudgetError) as error:
            # Deterministic algorithms may need more than those that were measured.
            record["equality_error"] = str(error)[:300]
            tidy(None, error)
            return record | plain
        return record | plain | {"equal": record["digest"] == plain["plain_digest"]}

    def _digest_of_method(self, cap: int | None) -> str:
        method = self.case.method
        if not method.startswith(OURS):
            return self._digest(method, None)
        try:
            return self._digest(method, cap)
        except belady.InfeasibleBudgetError as error:
            smallest = error.smallest_bytes
            tidy(None, error)
        return self._digest(method, int(smallest * 1.1))

    def _digest(self, method: str, cap: int | None) -> str:
        work = self._make()
        with session(work, method, cap) as it:
            made = digest(it, self.case.equal_steps)
        tidy(work)
        return made


def _kept(record: Record, cap: int | None) -> bool:
    """Whether measured iterations kept to the cap without flushing the allocator's cache."""
    if "allocation_retries" in record:
        return bool(record["allocation_retries"] == 0)
    return cap is None or record["peak_allocated_bytes"] <= cap


def _trial(work: Workload, method: str, cap: int) -> str | None:
    """Why ``method`` does not pass ``cap``, or None."""
    try:
        with session(work, method, cap) as it:
            it.warm_up()
            record = settled_peak(it, _STEADY)
    except OutOfMemory as error:
        tidy(work, error)
        return "out of memory"
    except belady.InfeasibleBudgetError as error:
        tidy(work, error)
        return f"infeasible below {error.smallest_bytes}"
    tidy(work)
    if _kept(record, cap):
        return None
    retries = record.get("allocation_retries")
    return f"{retries} retries" if retries else f"a peak of {record['peak_allocated_bytes']}"


if __name__ == "__main__":
    main()
