"""Whether a method's losses and gradients are plain PyTorch's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import belady
from benchmarks.cases import OWN, Case, Record
from benchmarks.measure import DIGEST_OF, digest
from benchmarks.memory import tidy, too_little
from benchmarks.methods import opened
from benchmarks.provenance import versions
from benchmarks.workloads import Workload

Make = Callable[[], Workload]


def equality(case: Case, make: Make, references: dict[str, Record], cap: int | None) -> Record:
    """Compare what the method of ``case`` computes under ``cap`` with plain's.

    Parameters
    ----------
    make
        A workload made anew, with equal weights each time.
    references
        Plain's results by `Case.reference`; what is missing is worked out and added. So is what
        another process found where the method differs from it: plain itself has been seen to give
        two results in processes of equal torch and card (GoogLeNet, ResNet-152 on the H200).
    """
    key, found = case.reference, versions(case.device)
    where = {name: found[name] for name in ("torch", "device_name")}
    where["digest_of"] = DIGEST_OF
    # Another machine or version may compute other bits.
    if where.items() - references.get(key, {}).items():
        references[key] = where | _plain(case, make)
    try:
        name = _digest_of_method(case, make, cap)
    except Exception as error:
        if not too_little(error):
            raise
        # Deterministic algorithms may need more than those that were measured.
        tidy(None, error)
        return references[key] | {"equality_error": str(error)[:300]}
    if name != references[key]["plain_digest"] and "plain_here" not in references[key]:
        references[key] = where | _plain(case, make)
    plain = references[key]
    return plain | {"digest": name, "equal": name == plain["plain_digest"]}


def _plain(case: Case, make: Make) -> Record:
    """What plain gives in this process, and whether it does so twice."""
    first, second = (_digest(case, make, "plain", None) for _ in range(2))
    return {"plain_digest": first, "plain_repeats": first == second, "plain_here": True}


def _digest_of_method(case: Case, make: Make, cap: int | None) -> str:
    if not case.method.startswith(OWN):
        return _digest(case, make, case.method, None)
    try:
        return _digest(case, make, case.method, cap)
    except belady.InfeasibleBudgetError as error:
        smallest = error.smallest_bytes
        tidy(None, error)
    return _digest(case, make, case.method, int(smallest * 1.1))


def _digest(case: Case, make: Make, method: str, cap: int | None) -> str:
    work = make()
    with opened(work, method) as opener, opener(cap) as it:
        made = digest(it, case.equal_steps)
    tidy(work)
    return made
