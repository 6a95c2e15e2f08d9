"""What the papers printed beside what the planners predict, and why they differ: one table.

Imports no torch.
"""

from __future__ import annotations

from benchmarks.cases import OURS, Record
from benchmarks.founders.claim import Claim, Net
from benchmarks.founders.claims import CLAIMS
from benchmarks.founders.details import at_speed, gib, overhead, slower

# Predictions this near to what was printed need no explanation.
NEAR = 0.05
_HEAD = (
    f"| system | published | more time, printed | predicted | why they differ |\n{'|---' * 5}|\n"
)


def table(plans: list[Record]) -> str:
    """Markdown: a row a claim."""
    return f"**Printed and predicted**\n\n{_HEAD}{''.join(_row(it, plans) for it in CLAIMS)}"


def of(claim: Claim, net: Net, plans: list[Record]) -> list[Record]:
    """Records of that network on the machine of the claim."""
    name = claim.machine, net.workload, net.batch
    return [r for r in plans if (r["machine"], r["workload"], r["batch"]) == name]


def differs(claim: Claim, net: Net, plans: list[Record]) -> bool:
    """Whether a prediction is missing, or is not near what the paper printed.

    Where the paper printed how long an iteration takes, the prediction at that speed is meant.
    """
    found = of(claim, net, plans)
    shown = _shown(claim, found)
    if not shown or shown[0]["outcome"] != "simulated":
        return True
    (at,) = at_speed(shown[0], found, "printed") or shown[:1]
    return net.overhead is not None and abs(overhead(at) - net.overhead) > NEAR


def _shown(claim: Claim, found: list[Record]) -> list[Record]:
    """Of the policy that stands for the system: in the paper's memory, and in the least."""
    same = {
        r["budget"]: r
        for r in found
        if (r["method"], r["speed"]) == (OURS + claim.policy, "nominal")
    }
    there = [budget for budget in ("share", "paper", "machine") if budget in same][:1]
    return [same[budget] for budget in (*there, "smallest") if budget in same]


def _row(claim: Claim, plans: list[Record]) -> str:
    published = f"{claim.published} [{claim.source}]"
    told = "<br>".join(_named(claim, net, _printed(net)) for net in claim.nets)
    predicted = "<br>".join(_named(claim, net, _predicted(claim, net, plans)) for net in claim.nets)
    cells = claim.system, published, told or "as published", predicted or "not simulated", claim.why
    return f"| {' | '.join(cells)} |\n"


def _named(claim: Claim, net: Net, text: str) -> str:
    return f"{net.workload}, {net.batch}: {text}" if len(claim.nets) > 1 else text


def _printed(net: Net) -> str:
    if net.overhead is None:
        return "no time"
    return f"{net.overhead:+.1%}" if net.overhead else "none of note"


def _predicted(claim: Claim, net: Net, plans: list[Record]) -> str:
    found = of(claim, net, plans)
    if not found:
        return "not simulated"
    if found[0]["outcome"] == "absent":
        return f"not simulated: {found[0]['error']}"
    texts = ", ".join(_in_budget(record, found) for record in _shown(claim, found))
    return f"`{claim.policy}` {texts}"


def _in_budget(record: Record, found: list[Record]) -> str:
    return f"{slower(record, found)} in {gib(record['budget_bytes'])} GiB"
