"""What a figure of a founding paper is: what was run, on what, and how it is to be read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Net:
    """A network of a claim.

    Attributes
    ----------
    workload
        Our name of it.
    memory
        What the paper ran it in, or asks for, where that is less than its machine has.
    seconds
        An iteration with everything kept on the paper's machine, as printed; 0 where it is not.
    in_core
        The largest batch that the paper ran with everything kept, where it ran this one because it
        is larger; else 0. What our trace holds at that batch is the budget that has the same
        relation to our peak as the machine's memory to the paper's.
    overhead
        Share of more time that the paper printed, or that follows from what it printed; None where
        it printed none.
    held
        What the paper's system held with everything kept, where it says so; at ``in_core`` it is
        taken to have filled the machine.
    """

    workload: str
    batch: int
    memory: str = ""
    seconds: float = 0.0
    in_core: int = 0
    overhead: float | None = None
    held: str = ""


@dataclass(frozen=True)
class Claim:
    """One published figure.

    Attributes
    ----------
    trap
        What it is often taken for and is not.
    machine
        Name in `benchmarks.founders.machines.MACHINES`, or empty where the paper names none.
    nets
        The networks that it is about; none for what is an average over networks that we do not
        have.
    why
        Why prediction and print differ, as far as it was looked into; or why nothing is simulated.
    policy
        Of ours, what stands for the system.
    """

    system: str
    published: str
    trap: str
    source: str
    machine: str
    nets: tuple[Net, ...]
    why: str = ""
    policy: str = "auto"
