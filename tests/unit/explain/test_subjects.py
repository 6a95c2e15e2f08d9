from __future__ import annotations

from dataclasses import replace

import pytest

from belady.explain import UnknownSubjectError, explain
from belady.explain.subjects import find
from belady.ir.trace import Trace
from tests.unit.explain.cases import PAGE, a_trace, run_of
from tests.unit.simulate.cases import trace_of

MODULES = ("layer1.0.conv", "layer1.0.relu", "layer1.1", "layer10.0", "3", "3.a", "Net")


def a_net(modules: tuple[str, ...] = MODULES) -> Trace:
    """One value for each module; later ones are larger."""
    last = 2 * len(modules)
    trace = trace_of([1] * last, [(PAGE * (i + 1), i, last - 1) for i in range(len(modules))])
    values = [
        replace(value, saves=(replace(value.saves[0], module=module),))
        for value, module in zip(trace.values, modules, strict=True)
    ]
    return replace(trace, values=tuple(values))


@pytest.mark.parametrize(
    ("what", "values"),
    [
        ("4", (4,)),
        ("layer1", (2, 1, 0)),
        ("layer1.0", (1, 0)),
        ("layer1.0.relu", (1,)),
        ("layer1*", (3, 2, 1, 0)),
        ("layer?.1", (2,)),
        ("*.0*", (3, 1, 0)),
        ("[3]", (5, 4)),
        ("Net", (6,)),
        ("*", (6, 5, 4, 3, 2, 1, 0)),
    ],
)
def test_what_is_found(what: str, values: tuple[int, ...]) -> None:
    assert find(a_net(), what).values == values


def test_modules_are_named_in_the_order_in_which_they_save() -> None:
    assert find(a_net(), "layer*").modules == MODULES[:4]
    assert find(a_net(), "2").modules is None


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("7", "ids end at 6; the nearest that are saved are 2, 3, 4, 5, 6"),
        ("9" * 5000, "ids end at 6"),
        ("layer2", "did you mean layer1, layer10"),
        ("LAYER10", "did you mean layer10"),
        ("conv", "layer1.0.conv"),
        ("qqq", "there are 3, 3.a, Net, layer1, layer1.0, ..."),
        ("²", "there are"),
        ("-1", "no module is called '-1'"),
        ("a\x1b[2J", r"'a\x1b[2J'"),
    ],
)
def test_what_is_not_there_names_what_comes_near(what: str, words: str) -> None:
    with pytest.raises(UnknownSubjectError) as caught:
        find(a_net(), what)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 200


def test_names_of_the_model_cannot_steer_a_terminal() -> None:
    with pytest.raises(UnknownSubjectError) as caught:
        find(a_net(("evil\x1b[2J",)), "evil")
    assert str(caught.value).isprintable()
    assert r"evil\x1b[2J" in str(caught.value)


def test_a_number_is_a_value_and_the_module_is_pointed_to() -> None:
    run = run_of(a_net(), budget=1 << 30)
    explanation = explain(run, "3")
    assert [it.value for it in explanation.values] == [3]
    assert "the module that is called so is '[3]'" in explanation.notes[0]
    assert explain(run, "2").notes == ()


def test_a_module_that_saves_nothing_is_known() -> None:
    trace = a_trace()
    ops = (*trace.ops[:3], replace(trace.ops[3], module="head"))
    explanation = explain(run_of(replace(trace, ops=ops)), "head")
    assert explanation.module is not None
    assert (explanation.module.values, explanation.values) == (0, ())
