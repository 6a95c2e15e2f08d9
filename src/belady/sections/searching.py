"""How sections of a call are looked for: with room for which workspaces, and who picks of them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from belady.planners.least import Least
from belady.planners.sectioning import Sectioning
from belady.planners.workspace import with_workspaces
from belady.sections.candidate import Candidate, chains
from belady.sections.race import Race
from belady.sections.timing import Timing
from belady.sections.workspaces import WITH_TENSOR_CORES, is_channels_last, workspace_share


class Searching:
    """Searches for sections within one budget.

    Attributes
    ----------
    device
        Where modules run.
    """

    def __init__(self, least: Least, device: torch.device) -> None:
        self.device = device
        self._least = least
        self._timed: dict[Hashable, float] = {}

    def beside(self, call: Candidate, share: float) -> Sectioning:
        """With room for workspaces of so much of input, weight and output of each convolution."""
        asking, parts = with_workspaces(call.trace, share), chains(call.module)
        return Sectioning(asking, self._least, parts, call.may_cut, call.dims)

    def share(self, module: nn.Module, call: tuple[Any, Any]) -> float:
        """What room is made for, where a call fits but for workspaces.

        Without tensor cores an algorithm can do with less than it may ask for.
        """
        return min(workspace_share(module, call, self.device), max(WITH_TENSOR_CORES))

    def in_turn(self, call: Candidate) -> list[Sectioning]:
        """Searches for a call that does not fit; the first that finds sections will do."""
        share = workspace_share(call.module, call.call, self.device)
        without = self.beside(call, 0.0)
        # Without convolutions both are the same, and a search takes seconds.
        asking = with_workspaces(call.trace, share)
        return [without] if asking == call.trace else [self.beside(call, share), without]

    def race(self, call: Candidate, *, whole: bool) -> Race | None:
        """Who picks the fastest sections, where that is for the device to say.

        With tensor cores an algorithm without its workspace is out of the question. Without them
        the size of a slice can matter more than a workspace. A process that wants the same bits
        each time is not to have them depend on a clock. And where a plan holds more than the floor,
        what it leaves to a workspace is not known before there is one.

        Parameters
        ----------
        whole
            Whether the call may also run as it is.
        """
        share = workspace_share(call.module, call.call, self.device)
        repeats = torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic
        if share <= max(WITH_TENSOR_CORES) or repeats or not self._least.is_floor:
            return None
        last = is_channels_last(call.module, call.call)
        timing = Timing(self.device, last, self._timed)
        race = Race(call, self.beside(call, 0.0), timing, self._least.hardware, whole)
        return race if race.knows_all else None
