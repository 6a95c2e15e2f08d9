"""vDNN's policies on networks small enough to work out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from belady.errors import InfeasibleBudgetError
from belady.ir.legality import check
from belady.ir.plan import Budget, Plan, Workspace
from belady.ir.trace import StorageKind, Trace
from belady.planners import plan, smallest_budget
from tests.unit.planners.nets import MIB, VGG, gpu, moves, net, written_by

PLENTY = Budget(1 << 40)
RESNET = "conv norm relu conv norm add@2 relu conv fc"
INCEPTION = "conv conv conv@1 conv@2 cat cat conv fc"


def moved(layers: str, policy: str, **options: bool) -> dict[int, tuple[int, int, int, int]]:
    trace = net(layers, **options)
    return moves(trace, plan(policy, trace, gpu(), PLENTY))


def test_vgg_all() -> None:
    # 16 ops. X of conv 2, pool 4, conv 5 move; of conv 0 (the user's) and fc 7 they stay.
    assert moved(VGG, "vdnn_all") == {
        # copy-in 11: BWD(conv 5) brings pool 4's, BWD(pool 4) conv 2's, as CONV bounds the window
        1: (2, 3, 11, 13),
        3: (4, 5, 10, 11),
        4: (5, 6, 8, 10),
    }


def test_vgg_conv() -> None:
    assert moved(VGG, "vdnn_conv") == {1: (2, 3, 10, 13), 4: (5, 6, 8, 10)}


def test_vgg_eager_acts_at_anchors() -> None:
    # No save lies at boundaries 3 and 6, so the eager engine frees one later.
    assert moved(VGG, "vdnn_all", every_boundary=False) == {
        1: (2, 4, 11, 13),
        3: (4, 5, 10, 11),
        4: (5, 7, 8, 10),
    }


def test_without_forward_op_backward_begins_at_first_read_of_what_a_layer_saved() -> None:
    trace = net(VGG)
    blind = replace(trace, ops=tuple(replace(op, forward_op=None) for op in trace.ops))
    for policy in ("vdnn_all", "vdnn_conv", "vdnn_dyn"):
        made = plan(policy, blind, gpu(), PLENTY)
        assert made.decisions == plan(policy, trace, gpu(), PLENTY).decisions


def test_backward_of_a_layer_that_saved_nothing_is_found_by_forward_op() -> None:
    trace = net("conv norm norm cat")
    assert moves(trace, plan("vdnn_all", trace, gpu(), PLENTY)) == {
        0: (1, 2, 5, 6),
        1: (2, 3, 4, 5),
    }
    blind = replace(trace, ops=tuple(replace(op, forward_op=None) for op in trace.ops))
    assert moves(blind, plan("vdnn_all", blind, gpu(), PLENTY)) == {
        0: (1, 2, 5, 6),
        1: (2, 3, 5, 5),  # nobody's backward is known to come before: fetched when read
    }


def test_fork_offloads_under_last_consumer_even_if_that_saves_nothing() -> None:
    # 18 ops. relu 2's output feeds conv 3 and, past norm 4, the join 5.
    trace = net(RESNET)
    made = moves(trace, plan("vdnn_conv", trace, gpu(), PLENTY))
    assert trace.values[written_by(trace, 2)].uses[1].op == 5
    # Under add 5; brought back by BWD(conv 7), the first whose window reaches layer 5.
    assert made == {2: (5, 6, 10, 14), 6: (7, 8, 9, 10)}


def test_inputs_of_a_join_are_treated_separately() -> None:
    # conv 0 feeds convs 1, 2, 3; cats 4 and 5 join them; 16 ops.
    trace = net(INCEPTION)
    made = plan("vdnn_all", trace, gpu(), PLENTY)
    # cats save nothing: what they read is not kept by autograd and must not move.
    assert moves(trace, made) == {0: (3, 4, 9, 12), 5: (6, 7, 8, 9)}


def test_input_of_an_activation_is_not_moved_on_its_own_account() -> None:
    assert set(moved("conv gelu conv gelu fc", "vdnn_all")) == {1}
    # But a conv that shares it has it moved, after the gelu, its last consumer.
    trace = net("conv conv gelu@1 cat fc")
    assert moves(trace, plan("vdnn_all", trace, gpu(), PLENTY)) == {0: (2, 3, 5, 7)}


def test_users_input_stays_even_if_the_user_lets_go_of_it() -> None:
    trace = net(VGG, input_held=False)
    assert trace.storages[trace.values[0].storage].kind is StorageKind.INPUT
    for policy in ("vdnn_all", "vdnn_conv"):
        assert -1 not in moves(trace, plan(policy, trace, gpu(), PLENTY))
    tight = Budget(smallest_budget("floor", trace, gpu(), PLENTY))
    assert -1 in moves(trace, plan("floor", trace, gpu(), tight))


def test_conv_policy_says_that_there_is_no_convolution() -> None:
    trace = net("norm fc norm fc")
    made = plan("vdnn_conv", trace, gpu(), PLENTY)
    assert made.moves_nothing
    assert any("the model has no convolution" in a.reason for a in made.assignments)
    assert set(moves(trace, plan("vdnn_all", trace, gpu(), PLENTY))) == {1}


def test_value_whose_read_passed_is_not_prefetched_again() -> None:
    trace = net(VGG)
    # conv 2's X is read already at boundary 8, out of order: fetched there, and no step wasted.
    early = written_by(trace, 1)
    value = trace.values[early]
    saves = tuple(replace(save, reads=(8,)) for save in value.saves)
    values = list(trace.values)
    values[early] = replace(value, saves=saves)
    odd = replace(trace, values=tuple(values))
    assert moves(odd, plan("vdnn_conv", odd, gpu(), PLENTY)) == {1: (2, 3, 8, 8), 4: (5, 6, 8, 10)}


def test_reasons_name_layer_and_way_back() -> None:
    trace = net(f"{VGG} fc")
    made = plan("vdnn_all", trace, gpu(), PLENTY)
    reason = {a.value: a.reason for a in made.assignments}
    assert reason[written_by(trace, 1)] == (
        "moved: layer input (CONV), out under op 2 aten.convolution.default in module 'layer2' "
        "(forward), prefetched"
    )
    assert reason[written_by(trace, 6)] == (
        "kept: not the input of a layer that this policy offloads"
    )


# -- algorithms ---------------------------------------------------------------------------------


def test_static_policy_takes_fastest_algorithms_if_they_fit() -> None:
    trace = net(VGG, workspace_bytes=3 * MIB)
    rich = plan("vdnn_all", trace, gpu(), PLENTY)
    assert rich.workspace is Workspace.PERFORMANCE
    convs = [i for i, op in enumerate(trace.ops) if op.algorithms]
    assert convs == [0, 2, 5, 10, 13, 15]
    assert rich.layer_algorithms == tuple((i, "fast") for i in convs)
    assert rich.numerics == ()
    poor = plan("vdnn_all", trace, gpu(), Budget(smallest_budget("vdnn_all", trace, gpu(), PLENTY)))
    assert poor.workspace is Workspace.MEMORY
    assert poor.layer_algorithms == tuple((i, "lean") for i in convs)
    assert poor.numerics == ("workspace=memory",)
    assert poor.decisions == rich.decisions


def test_no_alternatives_or_exact_leave_algorithms_alone() -> None:
    for trace, exact in ((net(VGG), False), (net(VGG, workspace_bytes=MIB), True)):
        for policy in ("vdnn_all", "vdnn_conv", "vdnn_dyn", "auto"):
            made = plan(policy, trace, gpu(), PLENTY, exact=exact)
            assert made.workspace is Workspace.UNCHANGED
            assert made.layer_algorithms == made.numerics == ()


def with_algorithms(made: Plan, chosen: dict[int, str]) -> Plan:
    return replace(made, layer_algorithms=tuple(chosen.items()))


def ladder(trace: Trace, budget: Budget) -> list[tuple[str, Plan]]:
    """The paper's trials in order, the greedy ones by trying each layer on its own."""
    convs = [i for i, op in enumerate(trace.ops) if op.algorithms]
    none = plan("baseline", trace, gpu(), PLENTY)
    conv, everything = (plan(name, trace, gpu(), PLENTY) for name in ("vdnn_conv", "vdnn_all"))
    fast, lean = dict.fromkeys(convs, "fast"), dict.fromkeys(convs, "lean")
    steps = [
        (name, with_algorithms(made, fast))
        for name, made in (("none", none), ("conv", conv), ("all", everything))
    ]
    for name, made in (("conv greedy", conv), ("all greedy", everything)):
        alone = {
            op: check(trace, gpu(), with_algorithms(made, lean | {op: "fast"}), budget)
            for op in convs
        }
        held = {op: verdict.peak_bytes for op, verdict in alone.items()}
        greedy = {op: "fast" if held[op] <= budget.device_bytes else "lean" for op in convs}
        steps.append((name, with_algorithms(made, greedy)))
    return [*steps, ("least", with_algorithms(everything, lean))]


def test_dyn_climbs_the_ladder() -> None:
    # The workspace of the last conv comes when most is held, that of the first when little is.
    trace = net(
        "conv relu conv relu pool relu conv relu pool conv fc", workspace_bytes=5 * MIB // 2
    )
    smallest = smallest_budget("vdnn_dyn", trace, gpu(), PLENTY)
    largest = smallest_budget("baseline", trace, gpu(), PLENTY)
    taken = []
    for device_bytes in range(largest + MIB, smallest - 1, -MIB // 4):
        budget = Budget(device_bytes)
        made = plan("vdnn_dyn", trace, gpu(), budget)
        name, expected = next(
            (name, it) for name, it in ladder(trace, budget) if check(trace, gpu(), it, budget).ok
        )
        assert made.decisions == expected.decisions
        assert set(made.layer_algorithms) == set(expected.layer_algorithms)
        single = name.endswith("greedy")
        assert made.workspace is (Workspace.MEMORY if single else Workspace.PERFORMANCE)
        if name not in taken:
            taken.append(name)
    assert taken == ["none", "conv", "all", "conv greedy", "all greedy"]
    with pytest.raises(InfeasibleBudgetError):
        plan("vdnn_dyn", trace, gpu(), Budget(smallest - 1))
