"""The plain parts of a document: numbers, text, truth values; and what is said when one is off."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

from belady.errors import DocumentError

LONGEST_TEXT = 4096
SMALLEST_INT, LARGEST_INT = -(2**63), 2**63 - 1


class Repeated(dict[str, Any]):
    """A JSON object in which the key ``repeated`` appears more than once."""

    repeated: str


class Misfit(Exception):
    """A value that does not fit its type; containers put its path in front on the way out."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.path: list[str] = []

    def document_error(self) -> DocumentError:
        """The same as an error for the user."""
        where = "".join(reversed(self.path)).removeprefix(".") or "document"
        return DocumentError(f"{where}: {self}")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object; to be used as ``object_pairs_hook``."""
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    result, seen = Repeated(found), set[str]()
    for key, _ in pairs:
        if key in seen:
            result.repeated = key
        seen.add(key)
    return result


def show(data: object) -> str:
    """Name a value in a message, in a few words."""
    if isinstance(data, dict):
        return "an object"
    if isinstance(data, (list, tuple)):
        return f"a list of {len(data)}"
    if data is None or isinstance(data, bool):
        return {None: "null", True: "true", False: "false"}[data]
    text = repr(data)
    return text if len(text) <= 40 else text[:37] + "..."


def refuse(wanted: str, data: object) -> NoReturn:
    """Say what was wanted and what is there."""
    raise Misfit(f"expected {wanted}, found {show(data)}")


def _integer(data: Any) -> int:
    if type(data) is not int:
        refuse("an integer", data)
    if not SMALLEST_INT <= data <= LARGEST_INT:
        refuse("an integer between -2**63 and 2**63 - 1", data)
    return data


def _number(data: Any) -> float:
    if type(data) is int:
        return float(_integer(data))
    if not isinstance(data, float):
        refuse("a number", data)
    if not math.isfinite(data):
        refuse("a finite number", data)
    return float(data)


def _text(data: Any) -> str:
    if type(data) is not str:
        refuse("text", data)
    if len(data) > LONGEST_TEXT:
        raise Misfit(f"text of {len(data)} characters, more than {LONGEST_TEXT}")
    if data.isascii():
        if "\0" in data:
            raise Misfit("text with a NUL character")
    elif any(char == "\0" or "\ud800" <= char <= "\udfff" for char in data):
        raise Misfit("text with a NUL character or half of a surrogate pair")
    return data


def _boolean(data: Any) -> bool:
    if type(data) is not bool:
        refuse("true or false", data)
    return data


def _are_integers(column: list[Any]) -> bool:
    return set(map(type, column)) <= {int} and (
        not column or SMALLEST_INT <= min(column) <= max(column) <= LARGEST_INT
    )


def _are_numbers(column: list[Any]) -> bool:
    return set(map(type, column)) <= {float} and all(map(math.isfinite, column))


def _are_texts(column: list[Any]) -> bool:
    if not set(map(type, column)) <= {str}:
        return False
    # Most names appear many times.
    texts = set(column)
    return all(len(text) <= LONGEST_TEXT and text.isascii() and "\0" not in text for text in texts)


def _are_booleans(column: list[Any]) -> bool:
    return set(map(type, column)) <= {bool}


PLAIN: dict[object, Callable[[Any], Any]] = {
    int: _integer,
    float: _number,
    str: _text,
    bool: _boolean,
}
# Whether many are for certain what they are to be, each as it is; what is not may be, too.
PLAIN_MANY: dict[object, Callable[[list[Any]], bool]] = {
    int: _are_integers,
    float: _are_numbers,
    str: _are_texts,
    bool: _are_booleans,
}
