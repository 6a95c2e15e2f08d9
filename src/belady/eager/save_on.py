"""`belady.save_on`: a drop-in for `torch.autograd.graph.save_on_cpu`, for any tier."""

from __future__ import annotations

from types import TracebackType

import torch

from belady.eager.content import Kept, unpack
from belady.eager.hooks import HookPair
from belady.eager.immediate import Immediate, Maker, encoding, moving
from belady.ir.trace import Tier
from belady.memory.carrier import Carrier

_WHERE = ("host", "disk", "encoded", "device")


# One a device for the life of the process: pinning anew for every block of code would cost more
# than the copies.
_CARRIERS: dict[torch.device, Carrier] = {}


def _carrier(device: torch.device) -> Carrier:
    carrier = _CARRIERS.get(device)
    if carrier is None:
        carrier = _CARRIERS[device] = Carrier(device)
    return carrier


def release() -> None:
    """Give back the host memory, files and threads that `save_on` holds for its next use.

    Saved tensors that backward has not asked for yet are lost: reading them raises `TierError`.
    """
    while _CARRIERS:
        _CARRIERS.popitem()[1].close()


class save_on:
    """Hold what autograd saves inside the block somewhere else until backward asks for it.

    Parameters
    ----------
    where
        ``"host"``: pinned host memory (plain RAM for CPU tensors). ``"disk"``: an unlinked file in
        the temporary directory. ``"encoded"``: on the device in a lossless encoding, where that is
        smaller (bool, integers). ``"device"``: where it is.
    min_bytes
        Tensors whose storage is smaller stay where they are.

    Raises
    ------
    ValueError
        If ``where`` is unknown or ``min_bytes`` negative.

    Notes
    -----
    Unlike `torch.autograd.graph.save_on_cpu`, strides, conjugate and negative bits come back as
    they were, a storage saved several times moves once, parameters stay, and a saved tensor that
    is changed in place later raises in backward as in plain autograd. The copy is issued when the
    next operator saves something, and what is copied is the storage, so memory that other tensors
    still hold is not freed by it.

    Examples
    --------
    >>> import torch, belady
    >>> x = torch.ones(4, requires_grad=True)
    >>> with belady.save_on("disk"):
    ...     y = (x.exp() ** 2).sum()
    >>> y.backward()
    """

    def __init__(self, where: str, *, min_bytes: int = 0) -> None:
        if where not in _WHERE:
            raise ValueError(f"where must be one of {', '.join(_WHERE)}, not {where!r}")
        if isinstance(min_bytes, bool) or not isinstance(min_bytes, int) or min_bytes < 0:  # type: ignore[redundant-expr]
            raise ValueError(f"min_bytes must be an integer of at least 0, not {min_bytes!r}")
        if where == "device":
            self._immediate = None
            self._hooks = HookPair(Kept, unpack)
            return
        maker: Maker = encoding if where == "encoded" else moving(_carrier)
        tier = Tier.DISK if where == "disk" else Tier.HOST
        self._immediate = Immediate(maker, (tier,), min_bytes=min_bytes)
        self._hooks = HookPair(self._immediate.pack, unpack)

    def __enter__(self) -> save_on:
        self._hooks.push()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.pop()
        if self._immediate is not None:
            self._immediate.end_pass()
