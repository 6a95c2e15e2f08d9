"""What an engine was asked for, and how far it has come with a kind of iteration."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from belady.ir.plan import Budget


class Stage(StrEnum):
    """How far a kind of iteration has come."""

    WARM = "warm-up"
    TIMED = "observed"
    SETTLING = "first planned"
    PACED = "paced"
    VERIFYING = "verified"
    STEADY = "steady"


@dataclass(frozen=True)
class Policy:
    """What the user asked for."""

    name: str
    budget: Budget
    exact: bool = False
