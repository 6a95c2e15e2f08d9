"""When, where and of what a record is: software, hardware, and what else ran beside it."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import belady
from benchmarks.cases import Record

# What workloads and peers may come from.
_PACKAGES = ("accelerate", "deepspeed", "timm", "torchtune", "torchvision", "transformers", "trl")
_GIT_TIMEOUT_S = 10


def provenance(device: str) -> Record:
    """All of it, at the moment of the call."""
    return versions(device) | {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "source_digest": source_digest(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        **(_of_device() if device == "cuda" else {}),
    }


def versions(device: str) -> Record:
    """Software and hardware that decide which bits come out."""
    return {
        "belady": belady.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "device_name": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "packages": dict(_packages()),
    }


@cache
def source_digest() -> str:
    """Name of belady's source files as they are, also where there is no git."""
    root = Path(belady.__file__).parent
    total = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        total.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:16]


@cache
def _commit() -> str | None:
    """The checkout's commit, and whether it was changed since; None outside of one."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            ("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"),
            cwd=Path(__file__).parent, capture_output=True, text=True, check=True,
            timeout=_GIT_TIMEOUT_S,
        ).stdout.strip()  # fmt: skip
    return None


def _of_device() -> Record:
    found: Record = {"cudnn": torch.backends.cudnn.version()}
    with suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        found["driver"] = pynvml.nvmlSystemGetDriverVersion()
        # This process is one of them; more share the device.
        name = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(name)
        found["processes_on_device"] = len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return found


def _packages() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            yield name, version(name)


def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
