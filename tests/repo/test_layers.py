"""Imports point down, and what must run without torch does."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
PACKAGE = SRC / "belady"

# Lowest first. A part may import those on lines above its own, not its neighbours on the line.
LAYERS = [
    "errors _version",
    "units",
    "ir",
    "simulate",
    "planners report",
    "explain",
    "memory",
    "measure",
    "forwards owners",
    "sections ordered",
    "eager graph",
    "virtual",
    "script",
    "launch",
    "demo",
    "cli",
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names.split()}
# The package itself names what `virtual` and those below it define.
ROOT_RANK = RANK["virtual"]
PUBLIC = {
    "virtualize": "virtual",
    "VirtualMemory": "virtual",
    "save_on": "eager",
    "cross_entropy": "sections",
}
WITHOUT_TORCH = [
    part
    for part in ("ir", "simulate", "planners", "report", "explain")
    if (PACKAGE / part / "__init__.py").exists()
]

FILES = sorted([*PACKAGE.glob("*/**/*.py"), *PACKAGE.glob("[!_]*.py")])


def relative(path: Path) -> str:
    return path.relative_to(SRC).as_posix()


def names_in(tree: ast.AST) -> Iterator[str]:
    """Every module imported, by statement or by `import_module`, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import on line {node.lineno}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            yield from (str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_point_down(path: Path) -> None:
    part = part_of(path)
    assert part in RANK, f"add {part} to LAYERS"
    for name in names_in(ast.parse(path.read_text("utf-8"))):
        root, other = [*name.split("."), ""][:2]
        other = PUBLIC.get(other, other)
        if root == "belady" and other != part:
            rank = RANK.get(other, ROOT_RANK)
            assert rank < RANK[part], f"{part} may not import {name}"


@pytest.mark.parametrize("part", WITHOUT_TORCH)
def test_runs_without_torch(part: str) -> None:
    code = f"""
import importlib, pkgutil, sys
sys.modules["torch"] = None  # an import of it raises
package = importlib.import_module("belady.{part}")
for module in pkgutil.walk_packages(package.__path__, "belady.{part}."):
    importlib.import_module(module.name)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=SRC, timeout=60)


def test_ir_needs_the_standard_library_only() -> None:
    for path in (PACKAGE / "ir").rglob("*.py"):
        roots = {name.split(".")[0] for name in names_in(ast.parse(path.read_text("utf-8")))}
        assert roots <= {"belady", *sys.stdlib_module_names}, path


def test_no_module_imports_itself_through_others() -> None:
    named = {path: relative(path).removesuffix(".py").replace("/", ".") for path in FILES}
    # A package is imported by its own name.
    named = {path: name.removesuffix(".__init__") for path, name in named.items()}
    modules, graph = {*named.values()}, dict[str, set[str]]()
    for path, name in named.items():
        top = [node for node in ast.parse(path.read_text("utf-8")).body if _at_the_top(node)]
        found = {item for node in top for item in names_in(node)}
        used = {item if item in modules else item.rpartition(".")[0] for item in found}
        graph[name] = (used & modules) - {name}
    assert tuple(graphlib.TopologicalSorter(graph).static_order())


def _at_the_top(node: ast.stmt) -> bool:
    """Whether it imports for the whole module, be it for types alone."""
    return isinstance(node, (ast.Import, ast.ImportFrom, ast.If))
