"""The contract of a peer: how a workload is trained in its way.

A peer is one file with `Peer` objects. It says why it is absent, or gives, for as long as a context
is open, what is called in place of the model and what is entered around each iteration. When the
context closes, the model is as it was found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch import nn

from benchmarks.workloads import Workload


@dataclass(frozen=True)
class Applied:
    """A workload as a method trains it.

    Attributes
    ----------
    model
        Called in place of the model.
    around
        Entered anew in each iteration, around forward and loss.
    backward_inside
        Whether backward belongs into ``around`` too.
    """

    model: Callable[..., Any]
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    backward_inside: bool = False


@dataclass(frozen=True)
class Peer:
    """Another way to train within less memory.

    Attributes
    ----------
    source
        Where it comes from, and the settings that it is run with.
    available
        Why it cannot run this workload here, or None.
    applied
        Context in which the workload is trained in the peer's way.
    anew
        Whether each cap needs a context of its own: what it sets aside under one cap would be there
        under the next.
    """

    name: str
    source: str
    available: Callable[[Workload], str | None]
    applied: Callable[[Workload], AbstractContextManager[Applied]]
    anew: bool = False


def always(_work: Workload) -> None:
    """For peers that torch brings."""


def needs_blocks(work: Workload) -> str | None:
    """For peers that work block by block."""
    return None if work.blocks else "the workload names no blocks"


def needs_cuda(work: Workload) -> str | None:
    """For peers that copy between a GPU and the host."""
    return None if work.setting.device == "cuda" else "needs a CUDA device"


def missing(*packages: str) -> str | None:
    """Which of the packages cannot be imported here."""
    absent = [name for name in packages if find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


@contextmanager
def blocks_wrapped(work: Workload, wrap: Callable[..., Callable[..., Any]]) -> Iterator[None]:
    """Replace the forward of every block by ``wrap(forward)``."""
    blocks = [work.model.get_submodule(name) for name in work.blocks]
    for block in blocks:
        block.forward = wrap(block.forward)
    try:
        yield
    finally:
        for block in blocks:
            # What hides the method of the class.
            del block.__dict__["forward"]


@contextmanager
def hooks_as_found(model: nn.Module) -> Iterator[None]:
    """Take off what others hang on the modules and leave there."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")
    found = [(m, name, getattr(m, name).copy()) for m in model.modules() for name in names]
    try:
        yield
    finally:
        for module, name, hooks in found:
            current = getattr(module, name)
            current.clear()
            current.update(hooks)
