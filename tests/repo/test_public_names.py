"""What `import belady` offers, and what it does not load."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import belady
import belady.errors
from belady import ir

SRC = Path(__file__).parents[2] / "src"
NAMES = [
    "BeladyError",
    "BudgetError",
    "DocumentError",
    "GraphError",
    "InfeasibleBudgetError",
    "MissingExtraError",
    "OrderError",
    "OutOfMemoryError",
    "PlanMismatchError",
    "ReplayError",
    "SectionError",
    "SpillError",
    "StaleValueError",
    "TierError",
    "TierFullError",
    "TraceError",
    "VirtualMemory",
    "__version__",
    "cross_entropy",
    "save_on",
    "virtualize",
]


def test_names_are_frozen() -> None:
    assert belady.__all__ == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_name_exists(name: str) -> None:
    assert name in dir(belady)
    assert getattr(belady, name) is getattr(belady, name)


def test_every_error_is_exported() -> None:
    defined = inspect.getmembers(belady.errors, inspect.isclass)
    for name, error in defined:
        assert getattr(belady, name) is error


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'belady' has no attribute 'virtualise'"):
        belady.virtualise  # noqa: B018 (looking it up is the test)


def run(code: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environment)


def test_import_alone_is_light() -> None:
    run("import sys, belady; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)")


def test_star_import_brings_every_name() -> None:
    run(f"from belady import *\nassert all(name in globals() for name in {NAMES!r})")


def test_first_use_loads() -> None:
    run("import sys, belady; belady.virtualize; sys.exit('torch' not in sys.modules)")


def test_ir_names_are_sorted_and_exist() -> None:
    assert len(set(ir.__all__)) == len(ir.__all__)
    for name in ir.__all__:
        assert hasattr(ir, name)
