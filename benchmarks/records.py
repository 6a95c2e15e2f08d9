"""Records: JSON lines, read, appended and merged. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from belady.ir import files
from benchmarks.cases import FOUND, Record, from_json, key_of
from benchmarks.errors import GivenError

RESULTS = Path(__file__).parent / "results"

# Name of the device and version of torch: what was measured on one says nothing of another.
Machine = tuple[str | None, str | None]
_NOWHERE: Machine = (None, None)


def machine(record: Record) -> Machine:
    """What a record was measured on."""
    return record.get("device_name"), record.get("torch")


def read(path: Path) -> list[Record]:
    """Records of a file in order, none where there is no file.

    A last line that was cut off is left out.

    Raises
    ------
    GivenError
        If another line is no record; it names file and line.
    """
    if not path.exists():
        return []
    *lines, last = path.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(lines, 1):
        record = _parsed(line)
        if record is None and line.strip():
            raise GivenError(f"{path}, line {number}: not a record, which is an object of JSON")
        found.append(record)
    return [record for record in (*found, _parsed(last)) if record is not None]


def _parsed(line: bytes) -> Record | None:
    """The record of a line; None where it is none, as no part of one is."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def committed() -> list[Record]:
    """All committed records of what was measured, in order of file and line."""
    found = [record for file in sorted(RESULTS.glob("*.jsonl")) for record in read(file)]
    return [record for record in found if record.get("outcome") != FOUND]


def append(path: Path, record: Record) -> None:
    """Write one record down; half a line of a process that was killed is taken off first."""
    begun = b""
    if path.exists():
        text = path.read_bytes()
        whole = text.rfind(b"\n") + 1
        if _parsed(text[whole:]) is not None:
            begun = b"\n"
        elif text[whole:]:
            os.truncate(path, whole)
    with path.open("ab") as file:
        file.write(begun + f"{json.dumps(record)}\n".encode())


def write(path: Path, found: Iterable[Record]) -> None:
    """Write all records down, in place of what was there."""
    files.write("".join(json.dumps(record) + "\n" for record in found).encode(), path)


def merge(paths: Iterable[Path]) -> list[Record]:
    """Records of all files; of one case on one machine, the first that came to something.

    Of before crashes named their machine, they give way to what any machine has of the case.
    """
    found: dict[tuple[str, Machine], Record] = {}
    for number, record in enumerate(r for path in paths for r in read(path)):
        name = (key_of(record) or f"without a key {number}", machine(record))
        if name not in found or _gives_way(found[name], record):
            found[name] = record
    told = {key for key, of in found if of != _NOWHERE}
    return [it for (key, of), it in found.items() if of != _NOWHERE or key not in told]


def _gives_way(before: Record, record: Record) -> bool:
    """Whether of two records of a case the later one holds: a search says less than a crash."""
    outcome = before.get("outcome")
    return outcome == FOUND or (outcome == "crash" and record.get("outcome") != FOUND)


def bases(records: Iterable[Record]) -> dict[str, int | None]:
    """What budgets are shares of, in bytes, by `Case.base`; None where there turned out to be none.

    That is the smallest cap that a method passed, and the most that plain held without one.
    """
    found: dict[str, int | None] = {}
    for record in records:
        if key_of(record) is None:
            continue
        case = from_json(record)
        if case.budget == "smallest":
            passed = record["budget_bytes"] if record["outcome"] in ("ok", FOUND) else None
            found[case.name] = found.get(case.name) or passed
        elif case.name == case.plain:
            found[case.name] = found.get(case.name) or record.get("peak_allocated_bytes")
    return found


def with_search(record: Record, known: Iterable[Record]) -> Record:
    """A record of a cap with how that was found, if ``known`` says it."""
    key = key_of(record)
    search = next((it for it in known if it.get("outcome") == FOUND and key_of(it) == key), None)
    if search is None or record.get("outcome") == FOUND:
        return record
    seconds = record.get("wall_seconds", 0.0) + search["wall_seconds"]
    return record | {"wall_seconds": seconds, "trials": search["trials"]}


def references(records: Iterable[Record]) -> dict[str, Record]:
    """What plain gave and on what, by the name that `Case.reference` gives it."""
    names = ("plain_digest", "plain_repeats", "torch", "device_name", "digest_of")
    return {
        from_json(record).reference: {name: record.get(name) for name in names}
        for record in records
        if "plain_digest" in record
    }
