"""The machine that a verb works for: torch is imported only when it has to be measured."""

from __future__ import annotations

from pathlib import Path

import typer

from belady.cli.inputs import read
from belady.ir.hardware import HardwareProfile


def measured(device: str | None, spill_dir: str | None, refresh: bool = False) -> HardwareProfile:
    """Profile of this machine; ``device`` None is its GPU, or its CPU where there is none."""
    import torch

    from belady.measure.probe import probe

    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise typer.BadParameter(f"{device!r} is not a device") from error
    devices = torch.cuda.device_count()
    if chosen.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{device!r}: belady runs on cpu and cuda")
    if chosen.type == "cuda" and (chosen.index or 0) >= devices:
        raise typer.BadParameter(f"{device!r}: this machine has {devices} CUDA devices")
    return probe(chosen, spill_dir=spill_dir, refresh=refresh)


def hardware_for(device: str, file: Path | None) -> HardwareProfile:
    """Profile from ``file``, or of this machine's ``device``."""
    if file is not None:
        return read(HardwareProfile, file)
    try:
        return measured(device, None)
    except typer.BadParameter as error:
        hint = "give --hardware, what `belady doctor --json` wrote where it was traced"
        raise typer.BadParameter(f"{error.message}: {hint}") from error
