"""Workers that share the suite must agree on the names of tests."""

from __future__ import annotations

import pytest


def test_no_name_holds_an_address(request: pytest.FixtureRequest) -> None:
    assert [item.nodeid for item in request.session.items if " at 0x" in item.nodeid] == []
