"""Bytes, seconds and names as people write and read them: one parser, one formatter each."""

from __future__ import annotations

import math
import numbers
import re

from belady.errors import BudgetError

_DECIMAL = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS = _DECIMAL | _BINARY
_BYTES = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)(?:[eE]([+-]?\d{1,3}))?\s*([A-Za-z]*)\s*")
_LARGEST = 2**63 - 1


def parse_bytes(value: object, what: str = "budget") -> int:
    """Read a number of bytes.

    Parameters
    ----------
    value
        An integer, a finite float, or text such as ``"12GiB"``, ``"12GB"``, ``"1.5 GiB"``.
        ``GB`` is 10**9 bytes, ``GiB`` is 2**30; a bare number is bytes. Fractions of a byte
        are rounded down.
    what
        Name of the argument, for the message.

    Returns
    -------
    int
        Bytes, at least 0.

    Raises
    ------
    BudgetError
        If ``value`` is of another type, negative, not finite, larger than 2**63 - 1, or has
        an unknown unit.

    Examples
    --------
    >>> parse_bytes("12GiB"), parse_bytes("12GB"), parse_bytes(512)
    (12884901888, 12000000000, 512)
    """
    if isinstance(value, bool) or not isinstance(value, (str, numbers.Real)):
        raise BudgetError(
            f"{what} must be bytes as a number or text such as '12GiB', not {value!r}"
        )
    amount: float | int
    if isinstance(value, str):
        amount = _parse_text(value, what)
    else:
        # numpy's integers must not lose bits on the way through float.
        amount = int(value) if isinstance(value, numbers.Integral) else float(value)
    if not math.isfinite(amount):
        raise BudgetError(f"{what} must be finite, not {value!r}")
    if not 0 <= amount <= _LARGEST:
        raise BudgetError(f"{what} must lie between 0 and 2**63 - 1 bytes, not {value!r}")
    return int(amount)


def _parse_text(text: str, what: str) -> float | int:
    match = _BYTES.fullmatch(text)
    unit = match.group(3).lower() if match else ""
    if match is None or unit not in _UNITS:
        raise BudgetError(
            f"{what}={text!r} cannot be read: write a number and one of "
            "B, kB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024)"
        )
    number, exponent = match.group(1), int(match.group(2) or 0)
    if number.isdigit() and exponent == 0:
        return int(number) * _UNITS[unit]
    return float(f"{number}e{exponent}") * _UNITS[unit]


def format_bytes(count: float) -> str:
    """Write bytes in the largest binary unit that leaves at least one before the point.

    Examples
    --------
    >>> format_bytes(0), format_bytes(1536), format_bytes(12 * 2**30)
    ('0 B', '1.50 KiB', '12.00 GiB')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(count) >= _UNITS[unit.lower()]:
            return f"{count / _UNITS[unit.lower()]:.2f} {unit}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """Write a duration with three significant digits in s, ms or µs.

    Examples
    --------
    >>> format_seconds(1.5), format_seconds(0.0545), format_seconds(2e-6)
    ('1.50 s', '54.5 ms', '2.00 µs')
    """
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        scaled = seconds * factor
        if abs(scaled) >= 1 or scaled == 0:
            return f"{_three_digits(scaled)} {unit}"
    return f"{_three_digits(seconds * 1e6)} µs"


def printable(text: str) -> str:
    r"""Escape what is not printable: control characters, bidirectional marks, surrogates.

    Examples
    --------
    >>> printable("conv\x1b[2J")
    'conv\\x1b[2J'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _three_digits(number: float) -> str:
    digits = 2 if abs(number) < 10 else 1 if abs(number) < 100 else 0
    return f"{number:.{digits}f}"
