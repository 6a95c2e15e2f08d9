"""The machines of the founding papers, as profiles, and where each figure is from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from belady.ir.hardware import Allocator, Capacity, HardwareProfile, Link, ManagedLinks
from belady.ir.trace import Tier

_GB, _MIB, _GIB = 10**9, 2**20, 2**30
# A transfer has to begin; the size does not matter to plans that move megabytes.
_LATENCY_S = 10e-6


@dataclass(frozen=True)
class Paging:
    """Rates at which pages of managed memory move."""

    prefetch_bytes_per_s: float
    fault_bytes_per_s: float


# Measured by NVIDIA, from host to device, beside 11.4 GB/s of explicit copies: prefetches, and a
# kernel that streams through pages ("Maximizing Unified Memory Performance in CUDA", 2017, about
# Pascal and Volta; taken from a quotation, which does not name the card). Assumed: that both cards
# have these rates, that a prefetch to the host is as fast as one to the device, that neither
# direction disturbs the other, and that a fault costs no more where the driver has to evict for it.
_PCIE3_PAGING = Paging(10.9 * _GB, 5.4 * _GB)
_PAGING_SOURCE = (
    "10.9 GB/s of managed memory to the device by prefetch and 5.4 by faults: NVIDIA, Maximizing "
    "Unified Memory Performance in CUDA (2017), for PCIe; the way out: assumed as fast"
)


@dataclass(frozen=True)
class Machine:
    """A machine of a paper.

    Attributes
    ----------
    flops_per_s, bytes_per_s
        Nominal single-precision rate, and rate of device memory.
    link_bytes_per_s
        What a copy between device and pinned memory reaches; both directions at once as well.
    device_bytes
        What a network may take.
    sources
        Where the figures are from.
    paging
        Of managed memory; None before Pascal, whose pages cannot fault on the device.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    link_bytes_per_s: float
    device_bytes: int
    host_bytes: int
    sources: str
    paging: Paging | None = None

    def carrying(self, factor: float) -> Machine:
        """The machine on which every byte takes so many times as long to move."""
        paging = self.paging and Paging(
            self.paging.prefetch_bytes_per_s / factor, self.paging.fault_bytes_per_s / factor
        )
        rate = self.link_bytes_per_s / factor
        return replace(self, link_bytes_per_s=rate, paging=paging)

    def profile(self) -> HardwareProfile:
        """The machine with an allocator that holds no more than is asked for."""
        return HardwareProfile(
            name=self.name,
            device="cuda",
            capacities=(
                Capacity(Tier.DEVICE, self.device_bytes),
                Capacity(Tier.HOST, self.host_bytes),
            ),
            links=(_out(self.link_bytes_per_s), _back(self.link_bytes_per_s)),
            allocator=Allocator(round_bytes=512, margin_fraction=0.0, margin_bytes=0),
            managed=self.paging and _managed(self.paging),
        )


def _managed(paging: Paging) -> ManagedLinks:
    prefetch = paging.prefetch_bytes_per_s
    return ManagedLinks(_out(prefetch), _back(prefetch), _back(paging.fault_bytes_per_s))


def _out(bytes_per_s: float) -> Link:
    return _link(Tier.DEVICE, Tier.HOST, bytes_per_s)


def _back(bytes_per_s: float) -> Link:
    return _link(Tier.HOST, Tier.DEVICE, bytes_per_s)


def _link(source: Tier, target: Tier, bytes_per_s: float) -> Link:
    curve = ((_MIB, bytes_per_s),)
    return Link(source, target, curve, bytes_per_s, _LATENCY_S, f"pcie-{source}")


MACHINES: Mapping[str, Machine] = {
    "Titan X": Machine(
        "Titan X (Maxwell), PCIe 3",
        7e12,
        336 * _GB,
        12.8 * _GB,
        12 * _GIB,
        64 * _GIB,
        "7 TFLOP/s, 336 GB/s, 12 GB, 12.8 GB/s of copies, 64 GB host: vDNN, section IV",
    ),
    "K40m": Machine(
        "Tesla K40m, PCIe 3",
        4.29e12,
        288 * _GB,
        10.0 * _GB,
        11580 * _MIB,
        64 * _GIB,
        "11,580 MB usable: Layrub, section 5; 4.29 TFLOP/s, 288 GB/s: NVIDIA's specification; "
        "10.0 GB/s of copies: bandwidthTest published by Microway for a K40m; host: assumed",
    ),
    "P100": Machine(
        "Tesla P100-PCIe 16 GB, PCIe 3",
        9.3e12,
        732 * _GB,
        12.7 * _GB,
        16 * _GIB,
        256 * _GIB,
        "12.7 GB/s of copies: 25 GB out in 1.97 s, Capuchin, section 6 (in: 2.60 s); 16 GB, "
        "9.3 TFLOP/s, 732 GB/s: NVIDIA's specification; host: assumed; " + _PAGING_SOURCE,
        _PCIE3_PAGING,
    ),
    "V100": Machine(
        "Tesla V100-PCIe 16 GB, PCIe 3",
        14e12,
        900 * _GB,
        12.8 * _GB,
        16 * _GIB,
        64 * _GIB,
        "16 GB, 64 GB host: OC-DNN, section 5; 14 TFLOP/s, 900 GB/s: NVIDIA's specification; "
        "12.8 GB/s of copies: as vDNN measured on PCIe 3; " + _PAGING_SOURCE,
        _PCIE3_PAGING,
    ),
}
