from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.training import repeatable


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with repeatable():
        yield
