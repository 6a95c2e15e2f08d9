"""Sweeps whose processes are played."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sweep
from benchmarks.cases import Case

# What records of this machine say of it, where processes are only played.
HERE = {"device_name": "a device", "torch": "2"}


def stand_in(measured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``measured`` be what measures, here."""
    monkeypatch.setattr(sweep, "measure", measured)
    monkeypatch.setattr(sweep, "here", lambda _device: HERE)


def endings(
    ending: Callable[[Case, Mapping[str, Any]], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let each process measure one case: its record has what ``ending`` says to what it is told."""

    def measured(
        cases: list[Case], known: Mapping[str, Any], _seconds: float, keep: Any, _gpu: Any
    ) -> tuple[list[Case], None]:
        keep(cases[0].as_json() | HERE | ending(cases[0], known))
        return cases[1:], None

    stand_in(measured, monkeypatch)


def arguments(tmp_path: Path, known: Sequence[Path] = (), at_once: int = 1) -> argparse.Namespace:
    """What a sweep is given, whose records go to ``out.jsonl``."""
    out = tmp_path / "out.jsonl"
    return argparse.Namespace(out=out, known=known, case_limit_s=200.0, at_once=at_once)
