"""The benchmarks keep the sizes that keep the source readable."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.repo import test_house as house

FILES = sorted((Path(__file__).parents[2] / "benchmarks").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_and_functions_are_short(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house, "SRC", path.parent)
    house.test_file_is_short(path)
    house.test_functions_are_short(path)
    house.test_functions_take_few_parameters(path)
