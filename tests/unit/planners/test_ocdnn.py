"""OC-DNN's two policies: what leaves, when, and what is said where nothing can."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belady.errors import InfeasibleBudgetError
from belady.ir.curves import managed_room
from belady.ir.hardware import Allocator
from belady.ir.plan import Budget, Managed
from belady.ir.residency import next_anchor
from belady.ir.trace import Trace
from belady.planners import plan, smallest_budget
from belady.simulate import simulate
from tests.support.strategies import machine, random_trace

GPU = machine("cuda", link_rate=5.5e10, disk=False, disk_rate=1.0, allocator=Allocator(512, 0.0, 0))
POLICIES = ("ocdnn_opt", "ocdnn_naive")


@pytest.fixture(scope="module")
def chain() -> Trace:
    return random_trace(seed=3, ops=400)


def between(trace: Trace, share: float) -> Budget:
    """A budget between the smallest and what keeping all takes."""
    least = smallest_budget("ocdnn_opt", trace, GPU, Budget(0))
    most = smallest_budget("baseline", trace, GPU, Budget(0))
    return Budget(int(least + share * (most - least)))


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_moves_when_everything_fits(policy: str, chain: Trace) -> None:
    made = plan(policy, chain, GPU, between(chain, 1.0))
    assert not made.decisions
    assert {it.reason for it in made.assignments} == {"kept: everything fits in device memory"}


def test_pages_fault_where_memory_ran_short(chain: Trace) -> None:
    made = plan("ocdnn_naive", chain, GPU, between(chain, 0.5))
    moves = [it for it in made.decisions.values() if isinstance(it, Managed)]
    assert len(moves) == len(made.decisions) > 0
    for move in moves:
        assert move.faults
        assert move.gone_by == move.prefetch_out_at
        assert move.prefetch_in_at == move.ready_by


def test_what_was_used_longest_ago_leaves_first(chain: Trace) -> None:
    made = plan("ocdnn_naive", chain, GPU, between(chain, 0.8))
    used = {
        value: max(
            next_anchor(chain, chain.values[value].first_save),
            chain.storages[chain.values[value].storage].released,
        )
        for value in made.decisions
    }
    left = [
        it.prefetch_out_at
        for _, it in sorted(made.decisions.items(), key=lambda item: (used[item[0]], item[0]))
        if isinstance(it, Managed)
    ]
    assert left == sorted(left)


def test_prefetch_begins_after_the_last_use_in_forward_and_before_the_read(chain: Trace) -> None:
    made = plan("ocdnn_opt", chain, GPU, between(chain, 0.5))
    early = 0
    for value, move in made.decisions.items():
        assert isinstance(move, Managed)
        storage = chain.storages[chain.values[value].storage]
        last = max(chain.values[value].first_save, storage.released)
        assert move.prefetch_out_at == next_anchor(chain, last)
        assert not move.faults
        early += move.prefetch_in_at < move.ready_by
    assert early > len(made.decisions) / 2


def test_what_is_read_last_leaves(chain: Trace) -> None:
    made = plan("ocdnn_opt", chain, GPU, between(chain, 0.8))
    movable = [it for it in made.assignments if "room for it" in it.reason]
    reads = {it.value: chain.values[it.value].first_read or 0 for it in movable}
    gone = [reads[value] for value in made.decisions]
    stay = [reads[it.value] for it in movable if it.value not in made.decisions]
    assert sum(gone) / len(gone) > sum(stay) / len(stay)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_prefetch_beats_faults(share: float, chain: Trace) -> None:
    opt, naive = (plan(policy, chain, GPU, between(chain, share)) for policy in POLICIES)
    busy = simulate(chain, GPU, opt).compute_seconds
    assert opt.predicted_seconds < 1.02 * busy < naive.predicted_seconds


@given(share=st.floats(0.0, 1.0), seed=st.integers(0, 20))
@settings(max_examples=20, deadline=None)
def test_blocks_have_their_room_within_the_budget(share: float, seed: int) -> None:
    trace = random_trace(seed, 60)
    budget = between(trace, share)
    for policy in POLICIES:
        try:
            made = plan(policy, trace, GPU, budget)
        except InfeasibleBudgetError:
            continue
        room = managed_room(trace, made, GPU.allocator)
        assert room < made.predicted_peak_bytes <= budget.device_bytes
        assert bool(room) == bool(made.decisions)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_profile_without_links_of_managed_memory_is_told_so(policy: str, chain: Trace) -> None:
    without = replace(GPU, managed=None)
    budget = between(chain, 0.5)
    with pytest.raises(InfeasibleBudgetError) as refused:
        plan(policy, chain, without, budget)
    assert refused.value.__notes__ == [
        f"policy {policy!r} moves nothing here: the profile of machine 'drawn cuda' has no links "
        "of managed memory, which the probe measures on a CUDA device that may share it with the "
        "host (concurrentManagedAccess)"
    ]
    assert refused.value.smallest_bytes == smallest_budget("baseline", chain, GPU, Budget(0))


def test_host_memory_is_a_limit(chain: Trace) -> None:
    made = plan("ocdnn_opt", chain, GPU, between(chain, 0.5))
    host = simulate(chain, GPU, made).peaks[1].nbytes
    tight = Budget(made.budget.device_bytes, host_bytes=host // 2)
    with pytest.raises(InfeasibleBudgetError):
        plan("ocdnn_opt", chain, GPU, tight)
