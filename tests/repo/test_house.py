"""Sizes that keep the source readable."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
FILES = sorted(SRC.rglob("*.py"))

LONGEST_FILE = 300
LONGEST_BODY = 50
MOST_PARAMETERS = 7
# "path::function" of what may break a rule: verbs, whose options typer reads off their parameters,
# and what a user writes by name.
ALLOWED = frozenset(
    {
        "belady/cli/plan.py::plan",
        "belady/cli/run.py::run",
        "belady/sections/cross_entropy.py::cross_entropy",
        "belady/virtual.py::virtualize",
    }
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def relative(path: Path) -> str:
    return path.relative_to(SRC).as_posix()


def functions(path: Path) -> list[Function]:
    found = [
        node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, Function)
    ]
    return [node for node in found if f"{relative(path)}::{node.name}" not in ALLOWED]


def body_lines(node: Function) -> int:
    start = node.body[0].lineno
    if ast.get_docstring(node) is not None:
        end = node.body[0].end_lineno
        assert end is not None
        start = end + 1
    assert node.end_lineno is not None
    return node.end_lineno - start + 1


def parameters(node: Function) -> int:
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(item.arg not in ("self", "cls") for item in named)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_file_is_short(path: Path) -> None:
    lines = len(path.read_text("utf-8").splitlines())
    assert lines <= LONGEST_FILE, f"{lines} lines; split it by what its parts are about"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_functions_are_short(path: Path) -> None:
    long = {f"line {node.lineno} {node.name}": body_lines(node) for node in functions(path)}
    assert {name: size for name, size in long.items() if size > LONGEST_BODY} == {}


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_functions_take_few_parameters(path: Path) -> None:
    many = {f"line {node.lineno} {node.name}": parameters(node) for node in functions(path)}
    assert {name: count for name, count in many.items() if count > MOST_PARAMETERS} == {}
