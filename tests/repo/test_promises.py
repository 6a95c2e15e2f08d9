"""Every promise names tests that exist, and every page that is linked is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROMISES = (ROOT / "docs" / "promises.md").read_text("utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PROMISES)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize(("path", "name"), sorted(set(NAMED)))
def test_test_exists(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_promise_is_held() -> None:
    promises = re.split(r"^\*\*\d+\. ", PROMISES, flags=re.MULTILINE)[1:]
    assert len(promises) == 7
    assert all("::test_" in promise for promise in promises)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_linked_files_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]*)?\)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), target
