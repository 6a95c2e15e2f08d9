"""Records: JSON lines, read, appended and merged. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from benchmarks.cases import Record, from_json, key_of

RESULTS = Path(__file__).parent / "results"


def read(path: Path) -> list[Record]:
    """Records of a file in order; a last line that was cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text("utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def committed() -> list[Record]:
    """All committed records, in order of file and line."""
    return [record for file in sorted(RESULTS.glob("*.jsonl")) for record in read(file)]


def append(path: Path, record: Record) -> None:
    """Write one record down; half a line of a process that was killed is taken off first."""
    if path.exists():
        text = path.read_bytes()
        if text and not text.endswith(b"\n"):
            path.write_bytes(text[: text.rfind(b"\n") + 1])
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def write(path: Path, found: Iterable[Record]) -> None:
    """Write all records down, in place of what was there."""
    path.write_text("".join(json.dumps(record) + "\n" for record in found), "utf-8")


def merge(paths: Iterable[Path]) -> list[Record]:
    """Records of all files; of one case, the first that came to something."""
    found: dict[str, Record] = {}
    for number, record in enumerate(r for path in paths for r in read(path)):
        key = key_of(record) or f"without a key {number}"
        if key not in found or found[key]["outcome"] == "crash":
            found[key] = record
    return list(found.values())


def caps(records: Iterable[Record]) -> dict[str, int | None]:
    """Smallest caps that methods passed, None where none did, by the name of `Case.cap_of`."""
    found: dict[str, int | None] = {}
    for record in records:
        if record.get("budget") == "smallest" and key_of(record) is not None:
            name = from_json(record).cap_of(record["method"])
            passed = record["budget_bytes"] if record["outcome"] == "ok" else None
            found[name] = found.get(name) or passed
    return found


def references(records: Iterable[Record]) -> dict[str, Record]:
    """What plain gave and on what, by the name that `Case.reference` gives it."""
    names = ("plain_digest", "plain_repeats", "torch", "device_name", "digest_of")
    return {
        from_json(record).reference: {name: record.get(name) for name in names}
        for record in records
        if "plain_digest" in record
    }
