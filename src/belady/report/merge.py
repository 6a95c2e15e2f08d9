"""Our events beside those of torch.profiler, in one trace."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from belady.errors import DocumentError

_LARGEST_BYTES = 2**30
_STEP = re.compile(r"ProfilerStep#(\d{1,18})")
# Beyond what systems call a process, and what Perfetto makes of a process named by text.
_FIRST_BESIDE = 10**9
_FIX = "give what torch.profiler's export_chrome_trace wrote"

Profile = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where our events go: numbers that are taken, the first to try, and our moment 0."""

    first: int = 1
    taken: frozenset[int] = frozenset()
    origin_us: float = 0.0

    def ids(self) -> Iterator[int]:
        """Numbers that are free."""
        return (number for number in count(self.first) if number not in self.taken)


ALONE = Place()


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Read Chrome trace JSON, decompressed when its name ends in ``.gz``.

    What JSON cannot hold and torch.profiler may write (NaN, Infinity) becomes text.

    Raises
    ------
    DocumentError
        If it is not such a trace, or larger than 1 GiB, decompressed.
    OSError
        If the file cannot be read.
    """
    try:
        data = json.loads(_content(Path(path)), parse_constant=str, parse_float=_finite)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DocumentError(f"{path}: not gzip: {error}; {_FIX}") from error
    except RecursionError:
        raise DocumentError(f"{path}: nested too deeply; {_FIX}") from None
    except ValueError as error:
        raise DocumentError(f"{path}: not JSON: {error}; {_FIX}") from error
    found: Profile = data if isinstance(data, dict) else {"traceEvents": data}
    events = found.get("traceEvents")
    if not isinstance(events, list):
        raise DocumentError(f"{path}: not a Chrome trace, it has no list 'traceEvents'; {_FIX}")
    for index, event in enumerate(events):
        if not isinstance(event, dict):
            raise DocumentError(f"{path}: traceEvents[{index}] is not an object; {_FIX}")
    return found


def _finite(text: str) -> float | str:
    number = float(text)
    return number if math.isfinite(number) else text


def _content(path: Path) -> bytes:
    with path.open("rb") as raw:
        stream = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        content = stream.read(_LARGEST_BYTES + 1)
    if len(content) > _LARGEST_BYTES:
        raise DocumentError(f"{path}: more than {_LARGEST_BYTES} bytes; profile fewer steps")
    return content


def place_in(profile: Profile, step: int | None = None) -> Place:
    """Numbers that no process or thread of ``profile`` has, and where our iteration begins.

    It begins with ``ProfilerStep#step``; without a step with the first one there is, or where
    there is none with the first event.

    Raises
    ------
    DocumentError
        If ``profile`` has no such step.
    """
    steps: dict[int, float] = {}
    first: float | None = None
    for event in profile["traceEvents"]:
        moment = _number(event.get("ts"))
        if moment is None or event.get("ph") == "M":
            continue
        first = moment if first is None else min(first, moment)
        found = _STEP.fullmatch(str(event.get("name")))
        if found:
            number = int(found[1])
            steps[number] = min(moment, steps.get(number, moment))
    if step is not None and step not in steps:
        known = ", ".join(map(str, sorted(steps)[:20])) or "none"
        raise DocumentError(f"the profile has no ProfilerStep#{step}; its steps: {known}")
    begin = min(steps.values(), default=first or 0.0) if step is None else steps[step]
    # An eighth of a microsecond is what our own times are rounded to.
    return Place(_FIRST_BESIDE, frozenset(_numbers(profile)), round(begin * 8) / 8)


def merged(profile: Profile | None, events: list[dict[str, Any]], about: object) -> Profile:
    """A trace of both, or of ``events`` alone; ``about`` says what made them."""
    if profile is None:
        return {"displayTimeUnit": "ms", "belady": about, "traceEvents": events}
    return {**profile, "belady": about, "traceEvents": [*profile["traceEvents"], *events]}


def _numbers(profile: Profile) -> Iterator[int]:
    """Numbers in use; what is named by text counts where it is a number in quotes."""
    for event in profile["traceEvents"]:
        for key in ("pid", "tid", "id"):
            name = event.get(key)
            if isinstance(name, str) and re.fullmatch(r"[0-9]{1,18}", name):
                yield int(name)
            elif isinstance(name, int):
                yield name


def _number(data: object) -> float | None:
    return float(data) if isinstance(data, (int, float)) and abs(data) < 2**53 else None
