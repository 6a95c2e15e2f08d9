"""An option for the part of the suite that takes long."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-operators",
        action="store_true",
        help="run every operator of PyTorch's database, not a slice",
    )
