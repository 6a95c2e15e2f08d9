"""What engines do for a policy beside carrying out its plans; each policy states its own."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Coordinated(Enum):
    """When backward goes in Layrub's coordinated order: gradients of parameters come first."""

    NEVER = auto()
    AS_NEEDED = auto()
    ALWAYS = auto()


@dataclass(frozen=True, slots=True)
class Traits:
    """What a policy has engines do; nothing, where its paper says what moves and when.

    Attributes
    ----------
    recomputes
        Whether its plans may replay ops, so that it is worth trying which ones can be.
    fills
        Whether it fills what room there is, so that a margin for the allocator can be learned.
    lean_as_floor
        Whether its leanest plan holds as little as the floor.
    slices_modules, slices_losses
        Whether modules run in slices where nothing else fits; and losses, and heads of attention.
    spares_workspace
        Whether convolutions may be asked for less workspace.
    coordinated
        When backward goes in the coordinated order.
    managed
        Whether its plans take managed memory.
    """

    recomputes: bool = False
    fills: bool = False
    lean_as_floor: bool = True
    slices_modules: bool = False
    slices_losses: bool = False
    spares_workspace: bool = False
    coordinated: Coordinated = Coordinated.NEVER
    managed: bool = False
