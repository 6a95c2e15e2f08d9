"""Cases in processes of their own, and what becomes of a process that does not answer."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from benchmarks.cases import FOUND, LOST, Case, Record
from benchmarks.errors import GivenError

ROOT = Path(__file__).parents[1]
# Characters and lines that are kept of what a process says, and seconds to hear the last of it.
_ERROR_END, _LINES, _TELLS = 2000, 200, 5.0
_ABOUT = (
    "import json, sys; from benchmarks.provenance import versions; "
    "print(json.dumps(versions(sys.argv[1])))"
)


def grouped(cases: Iterable[Case]) -> Iterator[list[Case]]:
    """Cases by process: neighbours that may share one, every other alone."""
    for _, group in itertools.groupby(cases, key=lambda case: case.shared and case.together):
        found = list(group)
        yield from [found] if found[0].shared else [[case] for case in found]


def here(device: str) -> Record:
    """Name of the device and version of torch, as records of this machine have them.

    Asked of a process of its own, as a context holds bytes of the device that is measured.
    """
    done = subprocess.run(
        [sys.executable, "-c", _ABOUT, device],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
    )
    if done.returncode:
        raise GivenError(f"device {device!r} cannot be used: {done.stderr.strip()[-_ERROR_END:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: found[name] for name in ("device_name", "torch")}


def measure(
    cases: list[Case],
    known: Mapping[str, Mapping[str, Any]],
    seconds: float,
    keep: Callable[[Record], None],
    gpu: str | None = None,
) -> tuple[list[Case], str | None]:
    """Measure the cases in one process that may take so long; each record is kept at once.

    Parameters
    ----------
    known
        What records say that others refer to: ``references`` and ``bases``.
    gpu
        The only one that the process sees; None: those that this one does.

    Returns
    -------
    tuple
        The cases that are not measured yet, and how the process ended if the first of them ended
        it. Last are those of which it has found the caps.
    """
    todo, found = list(cases), list[Case]()
    request = {"cases": [case.as_json() for case in cases], **known}
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="backslashreplace",
        cwd=ROOT,
        env=environment() | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}),
    ) as child:
        late, said = threading.Event(), deque[str](maxlen=_LINES)
        # The thread's own from here on: whoever closes a pipe waits for who reads from it, and a
        # process that the child has left behind can keep it open.
        told, child.stderr = child.stderr, None

        def stop() -> None:
            late.set()
            child.kill()

        killer = threading.Timer(seconds, stop)
        teller = threading.Thread(target=_pass_on, args=(told, said), daemon=True)
        killer.start()
        teller.start()
        try:
            _ask(child.stdin, json.dumps(request))
            for line in child.stdout or ():
                if line.startswith('{"workload"'):
                    record, case = json.loads(line), todo.pop(0)
                    keep(record)
                    if record["outcome"] == FOUND:
                        found.append(case)
            child.wait()
        finally:
            killer.cancel()
            child.kill()
        teller.join(_TELLS)
    status = child.returncode
    limit = f"was ended after {seconds:.0f} s, its limit (--case-limit-s)"
    why = limit if late.is_set() else f"ended with {status}"
    ended = f"the process {why}: {''.join(said)[-_ERROR_END:]}"
    return [*todo, *found], ended if todo and status != LOST else None


def _pass_on(told: IO[str], said: deque[str]) -> None:
    """Show what a process tells as it goes, and keep the last of it."""
    with told:
        for line in told:
            said.append(line)
            # Read on where nobody listens, or the process would wait for room.
            with suppress(OSError, ValueError):
                print(line, end="", file=sys.stderr, flush=True)


def _ask(given: IO[str] | None, request: str) -> None:
    """Hand the request over; the pipe stays open, as its end tells the process to end too."""
    if given is None:
        return
    try:
        given.write(f"{request}\n")
        given.flush()
    except BrokenPipeError:
        # It is gone, as its status will say; what is left to be written must not be tried again.
        with suppress(BrokenPipeError):
            given.close()


def environment() -> dict[str, str]:
    """The caller's, with the package's source and what deterministic algorithms ask for.

    That setting of cuBLAS is what it takes by default on Hopper.
    """
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ, "PYTHONPATH": path}
