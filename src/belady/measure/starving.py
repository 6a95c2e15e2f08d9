"""What is said where the device runs out of memory in spite of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from belady.errors import OutOfMemoryError
from belady.units import format_bytes


def out_of_memory(
    error: torch.OutOfMemoryError, engine: object, more: str = ""
) -> OutOfMemoryError:
    """What is raised for torch's error, and what to do about it.

    Parameters
    ----------
    engine
        What ran the iteration; it may know ``least_bytes``, and ``reasons`` why parts of the models
        are not managed.
    more
        What was done about it already, as sentences.
    """
    said = f"the device ran out of memory in spite of the plan ({error}); {_to_do(engine)}"
    return OutOfMemoryError(f"{said}. {more}" if more else said)


def tell(error: torch.OutOfMemoryError, engine: object) -> None:
    """Add to torch's error what it means for the plan, and what to do about it; once."""
    if not any(it.startswith("belady:") for it in getattr(error, "__notes__", ())):
        error.add_note(
            "belady: this was in spite of the plan, and the next iterations will leave more room; "
            f"{_to_do(engine)}. vm.step(closure) puts such an iteration back and runs it again"
        )


@contextmanager
def telling(starved: Callable[[], None], engine: object) -> Iterator[None]:
    """Call ``starved`` and tell if the block runs out of memory; the error goes on."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        starved()
        tell(error, engine)
        raise


def _to_do(engine: object) -> str:
    least = getattr(engine, "least_bytes", 0)
    said = "a larger budget, or policy='floor', leaves the allocator more room"
    if least:
        said += f". With Adam's state, born in its first step, {format_bytes(least)} are needed"
    left_out = next(iter(getattr(engine, "reasons", ())), None)
    if left_out is not None:
        said += f". Not all of the model is managed ({left_out}): with engine='eager' it is"
    return said
