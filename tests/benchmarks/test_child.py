"""Whatever happens to a case is a record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import belady
from benchmarks import child, smallest
from benchmarks.bounds import bound_of_own
from benchmarks.cases import Case
from benchmarks.child import Known
from benchmarks.peers import PEERS
from benchmarks.workloads import Recipe
from tests.parity.test_cutting import WIDE, needed, trained

CASE = Case("vgg19", "plain", device="cpu", toy=True, repeats=2)
INFEASIBLE = belady.InfeasibleBudgetError(
    needed_bytes=3, budget_bytes=1, smallest_bytes=4, op="op", module="module"
)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (torch.OutOfMemoryError("no room"), "out of memory"),
        (RuntimeError("cuDNN: GET was unable to find an engine"), "out of memory"),
        (belady.OutOfMemoryError("no room"), "out of memory"),
        (INFEASIBLE, "infeasible"),
        (RuntimeError("a fault"), "crash"),
        (ImportError("no torchvision"), "absent"),
    ],
)
def test_an_error_is_an_outcome(
    error: Exception, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(Recipe, "make", fail)
    record = child._outcome(CASE, Known({}))
    assert record["outcome"] == outcome
    assert str(error)[:300] in record["error"]


def test_an_absent_peer_says_why() -> None:
    record = child._outcome(Case("vgg19", "trl", device="cpu", toy=True), Known({}))
    assert (record["outcome"], record["error"]) == ("absent", "needs a CUDA device")


def test_a_policy_on_captured_graphs_has_the_bits_of_plain_pytorch() -> None:
    case = Case("vgg19", "belady-graph:baseline", "1GiB", equal_steps=1, **_toy())
    record = child._outcome(case, Known({}))
    assert record["equal"]
    assert record["planner"].startswith("baseline/")
    # A mode that counts would see plain PyTorch, as nothing is captured under one.
    less = replace(case, method="belady-graph:floor", equal_steps=0)
    lean = child._outcome(less, Known({}))
    assert lean["peak_allocated_bytes"] < record["peak_allocated_bytes"]
    # Everything would fit, so waiting for copies is what another plan need not do.
    assert 0 < lean["own_bound_seconds"] < lean["predicted_seconds"]


@pytest.mark.parametrize(("name", "word"), [("vgg18", "vgg19"), ("", "vgg19")])
def test_an_unknown_workload_names_those_there_are(name: str, word: str) -> None:
    record = child._outcome(Case(name, "plain", device="cpu", toy=True), Known({}))
    assert record["outcome"] == "crash"
    assert word in record["error"]


def test_plains_figures_of_another_version_are_worked_out_again() -> None:
    case = Case("vgg19", "checkpoint", device="cpu", toy=True, repeats=2, equal_steps=1)
    old = {case.reference: {"plain_digest": "?", "plain_repeats": True, "torch": "1"}}
    record = child._outcome(case, Known(old))
    assert record["equal"]
    assert len(record["plain_digest"]) == 64


def test_plain_of_another_process_is_enough_only_where_the_bits_are_its_own() -> None:
    case = Case("vgg19", "checkpoint", device="cpu", toy=True, repeats=2, equal_steps=1)
    known = Known({})
    here = child._outcome(case, known)
    assert here["equal"]
    assert here["plain_here"]
    there = dict(known.references[case.reference])
    del there["plain_here"]
    same = child._outcome(case, Known({case.reference: there}))
    assert same["equal"]
    assert "plain_here" not in same
    other = child._outcome(case, Known({case.reference: there | {"plain_digest": "?"}}))
    assert other["equal"]
    assert other["plain_here"]
    assert other["plain_digest"] == here["plain_digest"]


def test_a_percentage_is_of_plains_peak() -> None:
    known = Known({})
    plain = child._outcome(CASE, known)
    half = child._outcome(Case("vgg19", "checkpoint", "50%", **_toy()), known)
    assert half["budget_bytes"] == plain["peak_allocated_bytes"] // 2


def test_a_budget_is_a_share_of_a_peers_cap() -> None:
    case = Case("vgg19", "save_on_cpu", "50%:checkpoint", **_toy())
    record = child._outcome(case, Known({}, {case.cap_of("checkpoint"): 3 << 20}))
    assert (record["outcome"], record["budget_bytes"]) == ("ok", 3 << 19)


def test_a_cap_that_is_known_is_not_searched_for_again() -> None:
    case = Case("vgg19", "checkpoint", "smallest", **_toy())
    found = child._outcome(case, Known({}))
    again = child._outcome(case, Known({}, {case.cap_of("checkpoint"): found["budget_bytes"]}))
    assert found["trials"]
    assert "trials" not in again
    assert again["budget_bytes"] == found["budget_bytes"]


@pytest.mark.parametrize(
    ("peers", "first"),
    [
        ({"checkpoint": 1 << 30, "save_on_cpu": 1_200_000}, 1_200_000),
        # Above what ours states, where one chance flush would end the search.
        ({"checkpoint": 1 << 30, "save_on_cpu": 4 << 20}, None),
        ({}, None),
    ],
)
def test_a_search_for_ours_begins_with_what_the_best_peer_passes(
    peers: dict[str, int], first: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How it begins does not depend on how near it is to come: any cap that passes will do.
    monkeypatch.setattr(smallest, "TOLERANCE", 1.0)
    case = Case("vgg19", "belady:auto", "smallest", **_toy())
    bases = {case.cap_of(peer): cap for peer, cap in peers.items()}
    # Another precision says nothing of this one.
    bases[replace(case, precision="bf16").cap_of("checkpoint")] = 1 << 10
    found = child._outcome(case, Known({}, bases))
    begun, _ = found["trials"][0]
    own = child._Bench(case, Known({}))._own()
    assert begun == (first or own)
    assert found["budget_bytes"] <= own


def _toy() -> dict[str, Any]:
    return {"device": "cpu", "toy": True, "repeats": 2}


def test_every_peer_says_where_it_is_from() -> None:
    assert all(peer.source for peer in PEERS.values())


def test_slices_have_a_bound_of_their_own() -> None:
    _, cut = trained(int(needed("floor") * 0.6), "auto", WIDE)
    assert 0 < bound_of_own(cut)["own_bound_seconds"] <= cut.predicted.seconds
    assert bound_of_own(replace(cut, plan=replace(cut.plan, numerics=()))) == {}


def test_without_a_solver_the_bound_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsolved(*_: object) -> None:
        raise belady.errors.MissingExtraError("needs belady[solver]")

    monkeypatch.setattr(child, "bounded", unsolved)
    record = child._outcome(Case("vgg19", "bound", "1GiB", **_toy()), Known({}))
    assert record["outcome"] == "absent"
    assert "belady[solver]" in record["error"]
