from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import ClassVar

import pytest

from tests.cli.support import FakeMemory


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> type[FakeMemory]:
    """A fresh stand-in for VirtualMemory, in its place."""

    class Fresh(FakeMemory):
        made: ClassVar[list[FakeMemory]] = []

    monkeypatch.setattr("belady.launch.VirtualMemory", Fresh)
    return Fresh


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Write a script and give its path."""

    def write(text: str, name: str = "train.py") -> str:
        path = tmp_path / name
        path.write_text(dedent(text))
        return str(path)

    return write
