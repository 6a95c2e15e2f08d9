"""The engine's own figures: parity of cost with plain, peaks and times as predicted.

``python -m benchmarks.engine OUT.jsonl [--only GROUP]`` runs every case in a process of its own
and appends one JSON line for each as soon as it is there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

POLICIES = "vdnn_conv,vdnn_all,vdnn_dyn"
NETS = ("alexnet", "googlenet", "resnet50", "vgg19")
PRECISIONS = ("tf32", "bf16", "fp32")

# (workload, methods, budget, precision, channels_last), by group; a process for each.
GROUPS: dict[str, list[tuple[str, str, str, str, bool]]] = {
    # When everything fits: plain and ours in turn, so that a drifting machine cancels out.
    "fits": [
        ("resnet50", "plain", "none", "bf16", True),
        ("resnet50", "auto", "none", "bf16", True),
    ]
    * 2,
    "plain": [(net, "plain", "none", precision, False) for precision in PRECISIONS for net in NETS],
    # The vDNN policies, each under a cap of its own predicted peak plus the stated margin.
    "founders": [
        (net, POLICIES, "own", precision, False) for precision in PRECISIONS for net in NETS
    ],
    # At the peak that save_on_cpu needs.
    "save_on_cpu": [
        ("resnet50", "plain", "none", "bf16", False),
        ("resnet50", "save_on_cpu", "none", "bf16", False),
        ("resnet50", "floor,lifetime", "own", "bf16", False),
        ("resnet50", "auto", "4GiB", "bf16", False),
        ("resnet50", "auto", "6GiB", "bf16", False),
    ],
}


def main() -> None:
    """Run the groups that the arguments name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", action="append", choices=sorted(GROUPS))
    parser.add_argument("--limit-s", type=float, default=540.0)
    parser.add_argument("--repeats", default="10")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.limit_s
    for group in arguments.only or list(GROUPS):
        for case in GROUPS[group]:
            if time.monotonic() > deadline:
                print(f"out of time before {group} {case}")
                return
            for record in _run(case, arguments.repeats):
                record["group"] = group
                with arguments.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                print(_line(record), flush=True)


def _run(case: tuple[str, str, str, str, bool], repeats: str) -> list[dict[str, object]]:
    workload, methods, budget, precision, channels_last = case
    command = [sys.executable, "-m", "benchmarks.case", workload, methods, budget]
    command += ["--precision", precision, "--repeats", repeats]
    command += ["--channels-last"] if channels_last else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        records.append(
            {
                "workload": workload,
                "method": methods,
                "outcome": "crash",
                "error": done.stderr[-2000:],
            }
        )
    return records


def _line(record: dict[str, object]) -> str:
    def ms(name: str) -> str:
        value = record.get(name)
        return f"{value * 1e3:.1f}" if isinstance(value, (int, float)) else "-"

    def gib(name: str) -> str:
        value = record.get(name)
        return f"{value / 2**30:.3f}" if isinstance(value, (int, float)) else "-"

    words = [str(record.get(k)) for k in ("workload", "method", "budget", "precision", "outcome")]
    return (
        f"{' '.join(words)}: {ms('median_seconds')} ms ({ms('pipelined_seconds')}), predicted "
        f"{ms('predicted_seconds')}, kernels {ms('kernel_seconds')}, host {ms('host_seconds')}; "
        f"peak {gib('peak_allocated_bytes')} predicted {gib('predicted_peak_bytes')} GiB, reserved "
        f"{gib('peak_reserved_bytes')} of {gib('budget_bytes')}, retries "
        f"{record.get('allocation_retries')}, {record.get('planner')} moves "
        f"{record.get('moved_values')}, stall {ms('stall_seconds')} predicted "
        f"{ms('predicted_stall_seconds')}, warm-up {record.get('warm_up')} "
        f"{record.get('error', '')}"
    )


if __name__ == "__main__":
    main()
