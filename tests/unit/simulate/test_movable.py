from __future__ import annotations

from dataclasses import replace

from belady.ir.trace import Tier, Trace
from belady.simulate.movable import Movable, movable, ports
from tests.unit.simulate.cases import cpu, gpu, link, machine, trace_of


def found(trace: Trace) -> list[tuple[int, int, int]]:
    items = movable(trace, gpu(), ports(gpu()))
    return [(item.value, item.start, item.end) for item in items]


def test_a_value_may_be_away_from_save_to_read() -> None:
    trace = trace_of([1] * 5, [(4, 0, 3)])
    assert movable(trace, gpu(), ports(gpu())) == [Movable(0, 1, 3, 4, 4.0, 4.0, 1, 3)]


def test_what_others_hold_saves_nothing() -> None:
    trace = trace_of([1] * 5, [(4, 0, 3)])
    held = replace(trace.storages[0], released=2)
    assert found(replace(trace, storages=(held,))) == [(0, 2, 3)]


def test_bytes_of_two_values_go_when_both_are_away() -> None:
    trace = trace_of([1] * 6, [(4, 0, 4), (4, 1, 5)])
    first, second = trace.values
    shared = replace(trace.storages[0], death=6)
    both = replace(trace, storages=(shared,), values=(first, replace(second, storage=0, version=1)))
    assert found(both) == [(0, 2, 4)]


def test_a_reloaded_copy_is_gone_though_the_original_would_be_held() -> None:
    trace = trace_of([1] * 6, [(4, 0, 3)])
    handed_on = replace(trace.storages[0], released=3, death=6)
    assert found(replace(trace, storages=(handed_on,))) == [(-1, 4, 6)]


def test_ways_out_of_the_device() -> None:
    assert [x.target for x in ports(gpu()).out] == [Tier.HOST]
    assert [x.source for x in ports(cpu()).back] == [Tier.DISK]
    assert not ports(machine(link(Tier.HOST, Tier.DISK, path="disk"))).out
