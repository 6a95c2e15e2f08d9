"""``belady doctor``: what this machine can do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from belady.cli.machine import measured
from belady.cli.options import JsonOption, SpillDirOption
from belady.cli.show import show_document, show_table
from belady.ir.hardware import HardwareProfile, Link
from belady.units import format_bytes, format_seconds


def doctor(
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="cpu, cuda, cuda:1, ...")
    ] = None,
    spill_dir: SpillDirOption = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Measure again instead of using the last result.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show what this machine can do: tiers, links, allocator, versions."""
    profile = measured(device, spill_dir, refresh)
    if json:
        show_document(profile)
        return
    show_table(profile.name, ("tier", "capacity"), _tiers(profile))
    columns = ("link", "alone", "both ways", "latency", "path")
    show_table("Links", columns, map(_link, profile.links))
    show_table("Settings and versions", ("name", "value"), _settings(profile))


def _tiers(profile: HardwareProfile) -> Iterator[tuple[str, str]]:
    for capacity in profile.capacities:
        yield capacity.tier.value, format_bytes(capacity.nbytes)
    yield "in use outside torch", format_bytes(profile.outside_bytes)


def _link(link: Link) -> tuple[str, ...]:
    return (
        f"{link.source.value} to {link.target.value}",
        f"{format_bytes(link.bytes_per_s)}/s",
        f"{format_bytes(link.duplex_bytes_per_s)}/s",
        format_seconds(link.latency_s),
        link.path,
    )


def _settings(profile: HardwareProfile) -> Iterator[tuple[str, str]]:
    allocator = profile.allocator
    yield "allocator rounds to", format_bytes(allocator.round_bytes)
    yield (
        "margin of a budget",
        f"{allocator.margin_fraction:.0%} + {format_bytes(allocator.margin_bytes)}",
    )
    yield from profile.settings
    yield from profile.versions
