"""Exit codes, and the one place that maps errors to them.

0 done, 1 the script failed or belady did, 2 the command cannot be carried out as given, 3 no plan
fits the budget, 4 the measured peak is over budget, 5 out of memory or disk, 130 interrupted.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from belady.cli.show import note
from belady.errors import (
    BeladyError,
    BudgetError,
    DocumentError,
    InfeasibleBudgetError,
    OutOfMemoryError,
    PlanMismatchError,
    ReplayError,
    TierFullError,
)
from belady.units import format_bytes

FAILED = 1
USAGE = 2
INFEASIBLE = 3
UNVERIFIED = 4
EXHAUSTED = 5
INTERRUPTED = 130

_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (KeyboardInterrupt, INTERRUPTED),
    (InfeasibleBudgetError, INFEASIBLE),
    (OutOfMemoryError, EXHAUSTED),
    (TierFullError, EXHAUSTED),
    (BudgetError, USAGE),
    (DocumentError, USAGE),
    (ReplayError, UNVERIFIED),
    (PlanMismatchError, USAGE),
    (BeladyError, FAILED),
)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM})


def code_of(error: BaseException) -> int:
    """Exit code for an error; an operating system's error comes from a path that was given."""
    if isinstance(error, OSError) and not isinstance(error, BeladyError):
        return EXHAUSTED if error.errno in _FULL else USAGE
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)


@contextmanager
def mapped() -> Iterator[None]:
    """Turn errors into a message on stderr and an exit code."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise typer.Exit(code_of(error)) from error
    except (BeladyError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            raise  # whoever read our output is gone: typer ends quietly
        note(_message(error))
        for line in getattr(error, "__notes__", ()):
            note(line)
        if isinstance(error, InfeasibleBudgetError):
            smallest = error.smallest_bytes
            note(f"the smallest that works: --budget {smallest} ({format_bytes(smallest)})")
        raise typer.Exit(code_of(error)) from error


def _message(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


class Guarded(TyperGroup):
    """The command and its verbs, with errors mapped to exit codes."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the command's own options, one of which shows something."""
        with mapped():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> object:
        """Run the verb."""
        with mapped():
            result: object = super().invoke(ctx)
            return result
