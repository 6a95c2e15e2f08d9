"""What contents ask of who carries their bytes."""

from __future__ import annotations

from typing import Protocol

import torch

from belady.ir.trace import Tier


class Landing(Protocol):
    """Bytes on their way back, as `belady.memory.parcels.Arrival` has them."""

    tensor: torch.Tensor

    def wait(self) -> None:
        """Make the current stream wait for them."""
        ...


class Sent(Protocol):
    """Bytes in a tier, as `belady.memory.parcels.Parcel` has them."""

    def wait_sent(self) -> None:
        """Make the current stream wait until they have left the device."""
        ...

    def fetch(self) -> Landing:
        """Start to copy them back."""
        ...


class Sender(Protocol):
    """Carries bytes between the device and the tiers below it: `Carrier`, for one.

    Attributes
    ----------
    device
        With its index.
    """

    device: torch.device

    def send(self, source: torch.Tensor, tier: Tier, label: int = -1) -> Sent:
        """Start to copy bytes out."""
        ...
