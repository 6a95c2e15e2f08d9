"""Layrub's policies on networks small enough to work out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from belady.ir.plan import Budget, Plan, Workspace
from belady.ir.trace import Trace
from belady.planners import plan, smallest_budget
from belady.planners.vdnn_layers import backward_starts
from tests.unit.planners.nets import MIB, VGG, cpu, gpu, moves, net, written_by

PLENTY = Budget(1 << 40)
MOVING = ("layrub_inter", "layrub_hybrid")


def made(trace: Trace, policy: str) -> Plan:
    return plan(policy, trace, gpu(), PLENTY)


@pytest.mark.parametrize("policy", MOVING)
def test_every_layer_but_the_last_two_gives_its_activations_away(policy: str) -> None:
    # 16 ops, so BWD(i) is op 15 - i. Conv 5 and relu 6 come before fc 7; relu 6 works in place on
    # what conv 5 wrote, and fc 7 reads it last: it stays, and so does nothing else.
    assert moves(net(VGG), made(net(VGG), policy)) == {
        # out under conv 2, gone when it ends; back while BWD(relu 3), op 12, runs
        1: (2, 3, 12, 13),
        # out under pool 4; back while BWD(conv 5), op 10, runs
        3: (4, 5, 10, 11),
        # out under conv 5; back while BWD(relu 6), op 9, runs
        4: (5, 6, 9, 10),
    }


def test_the_way_back_takes_one_layer_whatever_is_in_it() -> None:
    # vDNN would look past norms and joins for the next convolution's input.
    trace = net("conv norm norm norm conv fc fc")
    back = {op: times[2:] for op, times in moves(trace, made(trace, "layrub_inter")).items()}
    assert back == {0: (11, 12), 1: (10, 11), 2: (9, 10), 3: (8, 9)}


def test_a_read_ahead_of_the_backward_of_a_layer_does_not_begin_it() -> None:
    # In the coordinated order a relu reads its output while the backward of conv 5 is under way.
    trace = net("conv norm relu conv fc fc")
    out = written_by(trace, 2)
    (own,) = (save for save in trace.values[out].saves if save.op == 2)
    early = replace(own, reads=(own.reads[0] - 1,))
    saves = tuple(early if save == own else save for save in trace.values[out].saves)
    values = list(trace.values)
    values[out] = replace(values[out], saves=saves)
    in_order = replace(trace, values=tuple(values))
    # What is brought back one layer before it is read comes no sooner.
    assert backward_starts(in_order) == backward_starts(trace)


def test_a_forked_activation_leaves_under_its_last_consumer() -> None:
    trace = net("conv norm relu conv norm add@2 relu conv fc")
    times = moves(trace, made(trace, "layrub_inter"))
    assert times[2][:2] == (5, 6)


def test_fully_connected_layers_move_too() -> None:
    trace = net("fc fc fc fc")
    assert set(moves(trace, made(trace, "layrub_inter"))) == {0}
    assert not moves(trace, made(trace, "vdnn_all"))


def test_intra_moves_nothing_and_says_why() -> None:
    trace = net(VGG)
    it = made(trace, "layrub_intra")
    assert it.moves_nothing
    assert any("inside of layers" in assignment.reason for assignment in it.assignments)
    for machine in (gpu(), cpu()):
        smallest = smallest_budget("layrub_intra", trace, machine, PLENTY)
        assert smallest == smallest_budget("baseline", trace, machine, PLENTY)


def test_reasons_name_the_layer_and_what_stays() -> None:
    trace = net(f"{VGG} fc")
    reasons = {it.value: it.reason for it in made(trace, "layrub_hybrid").assignments}
    assert reasons[written_by(trace, 1)] == (
        "moved: an activation, out under op 2 aten.convolution.default in module 'layer2' (forward)"
    )
    assert reasons[written_by(trace, 6)] == "kept: an activation of the last two layers"


@pytest.mark.parametrize("policy", ["layrub_inter", "layrub_intra", "layrub_hybrid"])
def test_algorithms_are_left_alone(policy: str) -> None:
    it = made(net(VGG, workspace_bytes=3 * MIB), policy)
    assert (it.workspace, it.layer_algorithms, it.numerics) == (Workspace.UNCHANGED, (), ())
