"""Trains the demonstration's network in processes of their own, under limits of the system.

Reads lines ``{look | plain | managed} ITERATIONS LIMIT BUDGET``; a LIMIT of 0 is none. Each is done
by a fork, which prints one line of JSON: what they need is loaded once, and nothing has run in the
parent.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import threading
from pathlib import Path
from typing import Any

import torch

import belady
from belady.demo import digits
from belady.demo.comparison import spill_folder
from belady.errors import InfeasibleBudgetError
from belady.planners import hybrid

_SAMPLE_SECONDS = 0.001


class Sampler:
    """Watches how many private writable bytes this process has: what RLIMIT_DATA counts."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        page = resource.getpagesize()
        with open("/proc/self/statm", encoding="ascii") as file:
            while not self._done.wait(_SAMPLE_SECONDS):
                file.seek(0)
                self.peak_bytes = max(self.peak_bytes, page * int(file.read().split()[5]))


def main() -> None:
    # Not where this is only imported, as pytest does of every file.
    # Enough saved bytes to tell them from what the process needs otherwise.
    digits.IMAGE = 32
    # A plan is as legal, and saves as much, after 40 mixes as after 300.
    hybrid._MOST = 40
    for name in ("sklearn.datasets", "torch._dynamo"):
        importlib.import_module(name)
    for line in sys.stdin:
        mode, *numbers = line.split()
        process = os.fork()
        if not process:
            work(mode, *map(int, numbers))
            sys.exit()
        _, status = os.waitpid(process, 0)
        if status:
            sys.exit("what was asked for last failed")


def work(mode: str, iterations: int, limit: int, budget: int) -> None:
    data = digits.load_digits(torch.device("cpu"))
    if mode == "look":
        print(json.dumps({"peak": plain_peak_bytes(data)}), flush=True)
        return
    training = digits.Training(data)
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    found: dict[str, Any] = {"error": None}
    with Sampler() as sampler:
        try:
            if mode == "managed":
                with belady.virtualize(training.model, budget, spill_dir=spill_folder()):
                    training.run(iterations)
            else:
                training.run(iterations)
        except (RuntimeError, MemoryError) as error:
            found["error"] = f"{type(error).__name__}: {error}"
    found["losses"] = [loss.hex() for loss in training.losses]
    found["data"] = sampler.peak_bytes
    found["resident"] = peak_resident_bytes()
    print(json.dumps(found), flush=True)


def plain_peak_bytes(data: digits.Digits) -> int:
    """What plain training holds at its peak, which is what a plan that keeps everything needs."""
    training, folder = digits.Training(data), spill_folder()
    try:
        with belady.virtualize(training.model, 1, policy="baseline", spill_dir=folder):
            training.run(1)
    except InfeasibleBudgetError as error:
        return error.smallest_bytes
    raise AssertionError("a byte was enough")


def peak_resident_bytes() -> int:
    """Most bytes resident since this program began; getrusage would count the parent's as well."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


if __name__ == "__main__":
    main()
