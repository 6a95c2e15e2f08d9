"""Hypothesis strategies: small random traces and machines that are consistent.

``traces()`` and ``hardware()`` draw one document each, ``instances()`` a trace with a machine of
the same device. ``random_trace(seed, ops)`` gives a large one without hypothesis, for timing.
"""

from __future__ import annotations

import random

from hypothesis import strategies as st

from belady.ir.hardware import Allocator, Capacity, HardwareProfile, Link, ManagedLinks
from belady.ir.trace import Tier, Trace
from tests.support.builder import OpSpec, build_trace

CURVE_BYTES = (1 << 12, 1 << 18, 1 << 24)
DEVICES = st.sampled_from(("cuda", "cpu"))
SIZES = st.one_of(
    st.sampled_from((0, 1, 511, 512, 513, 1 << 20)), st.integers(min_value=1, max_value=1 << 22)
)
MICROSECONDS = st.integers(min_value=0, max_value=500)


def op_specs() -> st.SearchStrategy[OpSpec]:
    """What one forward op does."""
    return st.builds(
        OpSpec,
        nbytes=SIZES,
        device_us=MICROSECONDS,
        host_us=st.integers(min_value=0, max_value=20),
        workspace_bytes=st.sampled_from((0, 0, 1000, 1 << 20)),
        parameter_bytes=st.sampled_from((0, 0, 512, 40_000)),
        branch=st.sampled_from((0, 0, 0, 1, 2)),
        join=st.booleans(),
        saves_input=st.booleans(),
        saves_output=st.booleans(),
        in_place=st.booleans(),
        asked=st.sampled_from((True, True, True, False)),
        lean_algorithm=st.booleans(),
        replayable=st.sampled_from((True, True, False)),
        mask=st.booleans(),
    )


def traces(
    *, min_ops: int = 1, max_ops: int = 8, device: str | None = None
) -> st.SearchStrategy[Trace]:
    """Consistent traces of ``min_ops`` to ``max_ops`` forward ops and as many backward ops."""
    return st.builds(
        build_trace,
        st.lists(op_specs(), min_size=min_ops, max_size=max_ops),
        device=DEVICES if device is None else st.just(device),
        every_boundary=st.sampled_from((False, False, True)),
        input_held=st.booleans(),
        loss=st.booleans(),
    )


def random_trace(seed: int, ops: int, *, device: str = "cuda") -> Trace:
    """Trace of ``ops`` ops, half of them backward, from a seed."""
    rng = random.Random(seed)
    specs = [
        OpSpec(
            nbytes=rng.randrange(1, 1 << 22),
            device_us=rng.randrange(500),
            host_us=rng.randrange(20),
            workspace_bytes=rng.choice((0, 0, 1 << 20)),
            parameter_bytes=rng.choice((0, 0, 40_000)),
            branch=rng.choice((0, 0, 0, 1, 2)),
            join=rng.random() < 0.5,
            saves_input=rng.random() < 0.5,
            saves_output=rng.random() < 0.5,
            in_place=rng.random() < 0.3,
            lean_algorithm=rng.random() < 0.2,
            replayable=rng.random() < 0.6,
        )
        for _ in range(ops // 2)
    ]
    return build_trace(specs, device=device)


def link(source: Tier, target: Tier, bytes_per_s: float, latency_s: float, path: str) -> Link:
    """Link whose copies take ``latency_s + bytes / bytes_per_s`` at every point of its curve."""
    curve = tuple((n, n / (latency_s + n / bytes_per_s)) for n in CURVE_BYTES)
    return Link(source, target, curve, 0.85 * curve[-1][1], latency_s, path)


def machine(
    device: str, *, link_rate: float, disk: bool, disk_rate: float, allocator: Allocator
) -> HardwareProfile:
    """Profile of a GPU (DEVICE, HOST and perhaps DISK) or of a CPU (DEVICE and DISK)."""
    capacities = [Capacity(Tier.DEVICE, 1 << 40)]
    links = []
    managed = None
    if device == "cuda":
        capacities.append(Capacity(Tier.HOST, 1 << 40))
        links.append(link(Tier.DEVICE, Tier.HOST, link_rate, 1e-5, "pcie-out"))
        links.append(link(Tier.HOST, Tier.DEVICE, link_rate, 1e-5, "pcie-in"))
        ends = (Tier.HOST, Tier.DEVICE)
        managed = ManagedLinks(
            link(*reversed(ends), 0.25 * link_rate, 1e-5, "managed-out"),
            link(*ends, 0.9 * link_rate, 1e-5, "managed-in"),
            link(*ends, 0.16 * link_rate, 1e-5, "managed-in"),
        )
    if disk or device == "cpu":
        capacities.append(Capacity(Tier.DISK, 1 << 42))
        for near in [Tier.DEVICE] if device == "cpu" else [Tier.DEVICE, Tier.HOST]:
            links.append(link(near, Tier.DISK, disk_rate, 1e-4, "disk"))
            links.append(link(Tier.DISK, near, disk_rate, 1e-4, "disk"))
    return HardwareProfile(
        name=f"drawn {device}",
        device=device,
        capacities=tuple(capacities),
        links=tuple(links),
        allocator=allocator,
        managed=managed,
    )


def hardware(*, device: str | None = None) -> st.SearchStrategy[HardwareProfile]:
    """Machines with room in every tier they have; links from far too slow to hardly felt."""
    return st.builds(
        machine,
        DEVICES if device is None else st.just(device),
        link_rate=st.sampled_from((1e8, 1e10, 5.5e10, 1e13)),
        disk=st.booleans(),
        disk_rate=st.sampled_from((1e8, 3.4e9)),
        allocator=st.builds(
            Allocator,
            round_bytes=st.sampled_from((1, 512)),
            margin_fraction=st.sampled_from((0.0, 0.05)),
            margin_bytes=st.sampled_from((0, 1 << 16)),
        ),
    )


def instances(
    *, min_ops: int = 1, max_ops: int = 8, device: str | None = None
) -> st.SearchStrategy[tuple[Trace, HardwareProfile]]:
    """A trace and a machine of the same device."""
    kinds = DEVICES if device is None else st.just(device)
    return kinds.flatmap(
        lambda kind: st.tuples(
            traces(min_ops=min_ops, max_ops=max_ops, device=kind), hardware(device=kind)
        )
    )
