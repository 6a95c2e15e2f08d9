"""What the text files promise is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from belady import __version__

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path, languages: str) -> list[str]:
    text = path.read_text("utf-8")
    return re.findall(rf"^```(?:{languages})\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_changelog_has_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    versions = re.findall(r"^## \[(.+?)\]", changelog, re.MULTILINE)
    assert versions[:2] == ["Unreleased", __version__]


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_make_commands_exist(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z]+):(?!=)", makefile, re.MULTILINE))
    shell = "\n".join(blocks(path, "sh|bash|console"))
    inline = "\n".join(re.findall(r"`(make [^`]*)`", path.read_text("utf-8")))
    used = set(re.findall(r"^(?:\$ )?make ([a-z]+)", f"{shell}\n{inline}", re.MULTILINE))
    assert used <= targets


def test_readme_names_both_commands() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert "make demo" in readme
    assert "make test" in readme


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_python_blocks_compile(path: Path) -> None:
    for block in blocks(path, "python|py"):
        compile(block, str(path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
