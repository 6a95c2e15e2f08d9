"""Predict an iteration, and bound what any plan could reach. Never imports torch."""

from __future__ import annotations

from belady.simulate.bound import Bound, bound
from belady.simulate.engine import simulate

__all__ = ["Bound", "bound", "simulate"]
