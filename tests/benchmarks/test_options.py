"""What cannot be measured is refused before anything is, with what there is."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import run
from benchmarks.cases import Case
from benchmarks.run import add_arguments, chosen, how
from benchmarks.suites import SUITES
from benchmarks.workloads import WORKLOADS, Setting
from tests.benchmarks.ended import status_of


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--workload vgg18", "there is no workload 'vgg18': one of alexnet, "),
        ("--method checkpiont", "there is no method 'checkpiont': POLICY after one of belady:"),
        ("--method belady:atuo", "there is no policy 'atuo': one of auto, hybrid"),
        ("--method belady-grpah:auto", "there is no method 'belady-grpah:auto'"),
        ("--method auto", "there is no method 'auto'"),
        ("--budget 4GiBs", "'4GiBs' is none of none, 4GiB, 50%"),
        ("--budget x%", "'x%' is none"),
        ("--budget nan%", "'nan%' is none"),
        ("--budget 0%", "'0%' is none"),
        ("--budget 0", "'0' is none"),
        ("--budget 50%:nobody", "there is no method 'nobody'"),
        ("--budget 50%:bound", "'50%:bound' is none"),
        ("--budget 50%:", "there is no method ''"),
        ("--budget 4GiB:checkpoint", "'4GiB:checkpoint' is none"),
        ("--budget 50%save_on_cpu", "'50%save_on_cpu' is none"),
        ("--budget least", "'least' is none"),
        ("--size batch", "'batch' is no NAME=NUMBER, such as batch=64"),
        ("--size batch=few", "'batch=few' is no NAME=NUMBER"),
        ("--size batch=0", "'batch=0' is no NAME=NUMBER"),
        ("--size bach=3", "resnet50 has no size 'bach': one of batch, depth"),
        ("--repeats 0", "'0' is no number from 1 on"),
        ("--rounds -1", "'-1' is no number from 1 on"),
        ("--toy --size batch=3", "networks at toy size have one size"),
        ("--suite toy --size batch=3", "networks at toy size have one size"),
        ("--suite fits --workload vit", "no suite that was named has such a case"),
        ("--method checkpoint --budget own", "checkpoint states no budget of its own"),
        ("--method bound --budget smallest", "bound passes no cap"),
    ],
)
def test_what_cannot_be_is_refused_with_what_there_is(
    arguments: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run, "execute", lambda *_: pytest.fail("it was measured"))
    command = ["run", str(tmp_path / "out.jsonl"), *arguments.split()]
    assert status_of(command, monkeypatch) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "option", ["--workload vgg18", "--policy atuo", "--size batch", "--ladder 0"]
)
def test_a_frontier_refuses_the_same(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["frontier", str(tmp_path / "out.jsonl"), *option.split()]
    assert status_of(command, monkeypatch) == 2


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_may_be_measured(suite: str, tmp_path: Path) -> None:
    given = _parsed(tmp_path, "--suite", suite)
    assert how(chosen(given), given)


def test_a_suite_at_toy_size_says_no_size_that_it_does_not_have(tmp_path: Path) -> None:
    given = _parsed(tmp_path, "--suite", "frontier", "--toy")
    cases = how(chosen(given), given)
    assert {case.workload for case in cases} >= {"vit", "gpt2"}
    assert {case.sizes for case in cases} == {()}


def test_sizes_are_those_of_the_case(tmp_path: Path) -> None:
    given = _parsed(
        tmp_path, "--size", "depth=101", "--size", "batch=3", "--size", "batch=4", "--rounds", "1"
    )
    (case,) = how(chosen(given), given)
    assert case == Case("resnet50", "plain", sizes=(("batch", 4), ("depth", 101)))


def test_a_toy_has_one_size() -> None:
    with pytest.raises(ValueError, match="one size"):
        WORKLOADS["vgg19"].make(Setting("fp32", device="cpu"), {"batch": 3}, toy=True)


def test_defaults_are_those_of_the_network() -> None:
    assert WORKLOADS["resnet152"].defaults() == {"batch": 128, "depth": 152}
    assert WORKLOADS["vit"].defaults() == {"batch": 64}


def _parsed(tmp_path: Path, *options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([str(tmp_path / "out.jsonl"), *options])
