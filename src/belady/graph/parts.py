"""What was seen of the calls of graphs in one iteration: the raw material of a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from belady.graph.joint import Joint, Step
from belady.graph.layout import Layout
from belady.ir.trace import StorageKind, Trace


@dataclass(frozen=True, slots=True)
class Timing:
    """What one op took: seconds of the device and of the host, scratch bytes."""

    device_seconds: float = 0.0
    host_seconds: float = 0.0
    workspace_bytes: int = 0


@dataclass
class Part:
    """The forward or the backward of one call of a graph.

    Attributes
    ----------
    call
        Number of the call in its iteration.
    inputs, results
        Names of the storages that came in and went out, by position; the same name is the same
        storage, also in other parts. None for what is no tensor.
    kinds
        What a storage is that was there before the iteration, by name.
    timings
        Of each op; empty where nothing was run.
    overwritten
        Names of the inputs that were written to between this part and the backward of its call.
    shortcuts
        Device seconds of a cheaper way to the same bits, `belady.graph.replays.shortcut_of`, by the
        number of the op in the part.
    outside_bytes
        Most bytes that others held in addition after this part, before the next one began.
    modules
        Path of the module that runs a step of forward, by its node.
    """

    call: int
    name: str
    joint: Joint
    layout: Layout
    forward: bool
    inputs: list[int | None]
    kinds: Mapping[int, StorageKind]
    results: list[int | None] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    overwritten: set[int] = field(default_factory=set)
    shortcuts: dict[int, float] = field(default_factory=dict)
    modules: Mapping[fx.Node, str] = field(default_factory=dict)
    outside_bytes: int = 0

    def module_of(self, step: Step) -> str:
        """Path of the module that runs a step of forward; empty where it is not known."""
        return self.modules.get(step.node, "")


@dataclass(frozen=True)
class Drawn:
    """A trace, and which of its numbers are whose.

    Attributes
    ----------
    starts
        First op of each part.
    values
        For each call, the value that lies on a storage of its graph before anyone overwrites it.
    """

    trace: Trace
    parts: tuple[Part, ...]
    starts: tuple[int, ...]
    values: tuple[dict[int, int], ...]


def ops_of(part: Part) -> list[Step]:
    """The steps of a part that are ops of its trace."""
    steps = part.joint.forward if part.forward else part.joint.backward
    return [step for step in steps if part.layout.is_op(step)]
