"""Trains a network whose single ops are large, in a process of its own, all saved tensors on disk.

``python child_in_sections.py LIMIT``, in bytes on top of what the process has without training.
Prints one JSON object.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import torch
from torch import nn

import belady
from belady.demo.comparison import spill_folder
from belady.ir.plan import Section
from belady.sections.wrap import wrap

ITERATIONS = 2
SAMPLES = 32


def network() -> nn.Sequential:
    """48 MiB for each value inside the first module; 2 go in, and 0.75 come out."""
    return nn.Sequential(
        nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(24, 24, 1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(8),
        ),
        nn.Flatten(),
        nn.Linear(24 * 16 * 16, 10),
    )


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    for _ in range(ITERATIONS):
        loss = model(torch.randn(SAMPLES, 1, 128, 128)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def attempt(sections: list[Section], more_bytes: int) -> dict[str, Any]:
    """Train with so many bytes on top of what the process has; 0: as many as it likes."""
    torch.manual_seed(0)
    model = network()
    undo = wrap(model, sections)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = private_bytes() + more_bytes if more_bytes else hard
    found: dict[str, Any] = {"error": None, "losses": []}
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        with belady.virtualize(model, "8GiB", policy="floor", spill_dir=spill_folder()):
            found["losses"] = train(model)
    except (RuntimeError, MemoryError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    undo()
    return found


def private_bytes() -> int:
    """What RLIMIT_DATA counts of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return resource.getpagesize() * int(file.read().split()[5])


def main() -> None:
    sections = [Section(("0",), 8)]
    # Measures the disk, and loads what is loaded once.
    attempt(sections, 0)
    limit = int(sys.argv[1])
    found = {
        "whole": attempt([], 0),
        "whole, limited": attempt([], limit),
        "sections, limited": attempt(sections, limit),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
