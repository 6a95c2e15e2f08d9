"""The search for what to prefetch, against the pseudo-code of the paper written down again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from belady.planners.vdnn_layers import Kind, find_prefetch, kind_of, prefetches
from tests.unit.planners.nets import net, written_by


def paper_find_prefetch(
    m: int, kinds: list[Kind], offloaded: list[bool], prefetched: list[bool]
) -> int:
    for layer in range(m - 1, -1, -1):
        if offloaded[layer] and not prefetched[layer]:
            prefetched[layer] = True
            return layer
        if kinds[layer] is Kind.CONV:
            return -1
    return -1


@given(st.lists(st.tuples(st.sampled_from(Kind), st.booleans()), max_size=25))
def test_find_prefetch_is_the_papers(layers: list[tuple[Kind, bool]]) -> None:
    kinds = [kind for kind, _ in layers]
    offloaded = [moved for _, moved in layers]
    prefetched = [False] * len(layers)
    pending = [layer for layer, moved in enumerate(offloaded) if moved]
    convs = [layer for layer, kind in enumerate(kinds) if kind is Kind.CONV]
    for m in range(len(layers) - 1, -1, -1):
        found = find_prefetch(m, pending, convs)
        assert found == paper_find_prefetch(m, kinds, offloaded, prefetched)
        if found >= 0:
            pending.remove(found)


@given(st.lists(st.sampled_from(["conv", "relu", "pool", "norm", "fc"]), min_size=2, max_size=14))
def test_whole_backward_is_the_papers(layers: list[str]) -> None:
    trace = net(" ".join(layers))
    n = len(layers)
    kinds = [kind_of(op) for op in trace.ops[:n]]
    # Offload every layer's X, wherever it is saved, as a policy might.
    left_under = {
        written_by(trace, layer - 1): layer
        for layer in range(1, n)
        if trace.values[written_by(trace, layer - 1)].saves
    }
    offloaded = [layer in left_under.values() for layer in range(n)]
    prefetched = [False] * n
    expected = {}
    for m in range(n - 1, -1, -1):
        # An in-place ReLU after another one saves nothing more than it wrote: it still has a BWD.
        found = paper_find_prefetch(m, kinds, offloaded, prefetched)
        if found >= 0:
            expected[written_by(trace, found - 1)] = 2 * n - 1 - m
    assert prefetches(trace, left_under) == expected
