from __future__ import annotations

import inspect
import pickle
import re

import pytest

from belady import errors

CLASSES: dict[str, type[Exception]] = dict(inspect.getmembers(errors, inspect.isclass))
LINE = re.compile(r"^    ([│ ├└─]*)(\w+Error)(?: +\((\w+)\))?", re.MULTILINE)


def drawn() -> dict[str, tuple[str | None, str | None]]:
    """Parent and built-in base of each class in the tree of the module's docstring."""
    found: dict[str, tuple[str | None, str | None]] = {}
    above: list[str] = []
    for branch, name, builtin in LINE.findall(errors.__doc__ or ""):
        depth = len(branch) // 4
        above[depth:] = [name]
        found[name] = (above[depth - 1] if depth else None, builtin or None)
    return found


def test_tree_matches_classes() -> None:
    tree = drawn()
    assert tree.keys() == CLASSES.keys()
    for name, (parent, builtin) in tree.items():
        bases = [base.__name__ for base in CLASSES[name].__bases__]
        assert bases == [base for base in (parent or "Exception", builtin) if base]


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_each_has_a_docstring_and_one_base(name: str) -> None:
    assert inspect.getdoc(CLASSES[name])
    assert issubclass(CLASSES[name], errors.BeladyError)


def test_infeasible_budget_says_what_to_do() -> None:
    error = errors.InfeasibleBudgetError(
        needed_bytes=300, budget_bytes=200, smallest_bytes=310, op="conv", module="net.0"
    )
    assert (error.needed_bytes, error.budget_bytes, error.smallest_bytes) == (300, 200, 310)
    assert (error.op, error.module) == ("conv", "net.0")
    for part in ("200 bytes", "300 bytes", "310 bytes", "conv", "'net.0'"):
        assert part in str(error)


def test_infeasible_budget_reaches_another_process() -> None:
    error = errors.InfeasibleBudgetError(
        needed_bytes=300, budget_bytes=200, smallest_bytes=310, op="conv", module="net.0"
    )
    error.add_note("why")
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is errors.InfeasibleBudgetError
    assert (str(found), vars(found)) == (str(error), vars(error))


@pytest.mark.parametrize("name", sorted(set(CLASSES) - {"InfeasibleBudgetError"}))
def test_others_carry_one_message_and_pickle(name: str) -> None:
    error = pickle.loads(pickle.dumps(CLASSES[name]("what was found")))
    assert type(error) is CLASSES[name]
    assert str(error) == "what was found"
