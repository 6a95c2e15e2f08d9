"""An explanation as a document: what was asked about, and every choice with its figures."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an iteration is predicted to be under one plan.

    Attributes
    ----------
    peak_bytes
        Device bytes held at the peak, allocator rounding included, margin excluded.
    needed_bytes
        Smallest budget in which that peak is safe, margin included.
    """

    seconds: float
    stall_seconds: float
    replay_seconds: float
    peak_bytes: int
    needed_bytes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Another decision for the values in question, all other decisions as planned.

    Attributes
    ----------
    name
        ``"keep"``, ``"offload to host"``, ``"offload to disk"`` or ``"recompute"``.
    values
        How many of the values in question it is for; the others stay as planned.
    detail
        How it would be done, in words.
    outcome
        None where it cannot be carried out at all.
    seconds_change, peak_change
        Against the plan as it is; 0 without an outcome.
    problems
        Why it may not run within the budget, in the judge's words; empty when it may.
    """

    name: str
    values: int
    detail: str
    outcome: Outcome | None
    seconds_change: float = 0.0
    peak_change: int = 0
    problems: tuple[str, ...] = ()

    @property
    def legal(self) -> bool:
        """Whether the judge accepts it within the budget."""
        return self.outcome is not None and not self.problems


@dataclass(frozen=True, slots=True)
class Weighed:
    """The decision for some values beside all others.

    Attributes
    ----------
    values
        What is decided together: the values in question and those that share their bytes.
    decision
        What the plan does with them; empty where it is not the same for all.
    stall_seconds
        Time that compute is predicted to wait for their copies.
    cost_seconds
        By how much the iteration would be shorter with them kept.
    keep_bytes
        Smallest budget in which they can be kept, all else as planned.
    next_best
        Index of the legal choice with the least seconds; -1 where none is legal.
    """

    values: tuple[int, ...]
    decision: str
    stall_seconds: float
    cost_seconds: float
    keep_bytes: int
    choices: tuple[Choice, ...]
    next_best: int


@dataclass(frozen=True, slots=True)
class ValueStory:
    """One value: what it is, what was decided and why, and what else could be.

    Attributes
    ----------
    kind
        Role of its storage, e.g. ``"activation"``.
    module, saved_by
        Module and op that saved it first; of its producer where nothing saves it.
    nbytes
        Bytes of its storage.
    saved_at, read_at
        Boundaries of the first save and of the first read in backward; -1 where there is none.
    seconds
        Predicted time between the two, or to its drop where backward never reads it.
    shares
        Saved values that share its bytes.
    stays
        Why no planner can move it; empty where one can.
    weighed
        None where there is no choice.
    """

    value: int
    kind: str
    module: str
    saved_by: str
    as_input: bool
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    saved_at: int
    read_at: int
    seconds: float
    decision: str
    reason: str
    shares: tuple[int, ...]
    stays: str
    weighed: Weighed | None


@dataclass(frozen=True, slots=True)
class Share:
    """Some of the values of a module: how many, and the bytes of their storages."""

    name: str
    values: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ModuleStory:
    """What the modules of one name or pattern save, and what could be done with all of it.

    Attributes
    ----------
    modules
        Paths that match and save something.
    decisions
        Values by decision.
    stays
        Values that no planner can move, by reason.
    weighed
        None where there is no choice for any of them.
    """

    name: str
    modules: tuple[str, ...]
    values: int
    nbytes: int
    decisions: tuple[Share, ...]
    stays: tuple[Share, ...]
    weighed: Weighed | None


@dataclass(frozen=True)
class Explanation:
    """Answer to ``belady explain``.

    Attributes
    ----------
    what
        What was asked about; empty for the largest saved values.
    subject
        What ran where, by which policy.
    saved
        How many values autograd saves beside parameters and buffers.
    planned
        Prediction for the plan as it is.
    measured_seconds
        Median of the measured iterations, if any.
    bound_seconds
        What no plan within the budget can be faster than; None where that cannot be said.
    bound
        The same in words: how far above it the plan is, or why that is not said.
    problems
        Why the plan as it is may not run within its budget; empty when it may.
    module
        None unless modules were asked about; then ``values`` are the largest of them.
    """

    what: str
    subject: str
    budget_bytes: int
    saved: int
    planned: Outcome
    measured_seconds: float | None
    problems: tuple[str, ...]
    values: tuple[ValueStory, ...]
    module: ModuleStory | None
    notes: tuple[str, ...] = ()
    bound_seconds: float | None = None
    bound: str = ""
    version: int = field(default=1, metadata={"const": 1})
