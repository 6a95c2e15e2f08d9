"""Options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from belady.units import parse_bytes

# A budget for scripts that are only watched.
NO_LIMIT = 2**62


def bytes_of(text: str | None, option: str) -> int | None:
    """Read an option in bytes that may be absent."""
    return None if text is None else parse_bytes(text, option)


def script_file(command: list[str], module: bool) -> list[Path]:
    """The file that a `ScriptArgument` names, if it names one."""
    return [] if module else [Path(command[0])]


def _known_policy(policy: str) -> str:
    from belady.planners import POLICIES

    if policy not in POLICIES:
        raise typer.BadParameter(f"{policy!r} is not one of {', '.join(POLICIES)}")
    return policy


def _known_engine(engine: str) -> str:
    from belady.eager.limits import ENGINES

    if engine not in ENGINES:
        raise typer.BadParameter(f"{engine!r} is not one of {', '.join(ENGINES)}")
    return engine


BudgetOption = Annotated[
    str,
    typer.Option("--budget", metavar="BYTES", help="Bytes that the device may hold, e.g. 8GiB."),
]
PolicyOption = Annotated[
    str,
    typer.Option("--policy", metavar="NAME", help="How to plan.", callback=_known_policy),
]
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="What runs the models: eager, graph, inductor or auto.",
        callback=_known_engine,
    ),
]
HostBudgetOption = Annotated[
    str | None,
    typer.Option("--host-budget", metavar="BYTES", help="Pinned bytes that the host may hold."),
]
DiskBudgetOption = Annotated[
    str | None,
    typer.Option("--disk-budget", metavar="BYTES", help="Bytes that the disk may hold."),
]
SpillDirOption = Annotated[
    str | None,
    typer.Option("--spill-dir", metavar="FOLDER", help="Folder for bytes that go to disk."),
]
HardwareOption = Annotated[
    Path | None,
    typer.Option(
        "--hardware",
        metavar="FILE",
        help="What `belady doctor --json` wrote; without it this machine is measured.",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document and nothing else.")
]
ModuleOption = Annotated[
    bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module, as in python -m.")
]
TraceArgument = Annotated[
    Path, typer.Argument(metavar="TRACE", help="What `belady profile` wrote.")
]
ScriptArgument = Annotated[
    list[str],
    typer.Argument(metavar="SCRIPT [ARGS]...", help="The script; what follows it is its own."),
]
