"""A record says when and of what it is."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import belady
from benchmarks import provenance


def test_a_record_bears_its_date_its_versions_and_its_machine() -> None:
    found = provenance.provenance("cpu")
    age = datetime.now(UTC) - datetime.fromisoformat(found["date"])
    assert timedelta(0) <= age < timedelta(minutes=1)
    assert provenance.versions("cpu").items() <= found.items()
    assert found["cores"] >= 1
    assert found["processor"] == found["device_name"]


def test_other_source_files_have_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text("1")
    monkeypatch.setattr(belady, "__file__", str(tmp_path / "__init__.py"))
    of = provenance.source_digest.__wrapped__
    first = of()
    (tmp_path / "note.txt").write_text("no source")
    assert of() == first
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    renamed = of()
    (tmp_path / "b.py").write_text("2")
    assert len({first, renamed, of()}) == 3
