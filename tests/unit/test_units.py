from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belady.errors import BudgetError
from belady.units import format_bytes, format_seconds, parse_bytes

UNITS = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("12GiB", 12 * 2**30),
        ("12GB", 12 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        (" 7 mib ", 7 * 2**20),
        (".5kB", 500),
        ("5.", 5),
        ("1e9", 10**9),
        ("1e-3 KB", 1),
        ("2.9", 2),
        (str(2**63 - 1), 2**63 - 1),
    ],
)
def test_text(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(("number", "nbytes"), [(0, 0), (512, 512), (1.9, 1), (Fraction(7, 2), 3)])
def test_numbers(number: object, nbytes: int) -> None:
    assert parse_bytes(number) == nbytes


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "cannot be read"),
        ("GiB", "cannot be read"),
        ("12 GiB please", "cannot be read"),
        ("12Gib12", "cannot be read"),
        ("12 Go", "cannot be read"),
        ("-1GiB", "cannot be read"),
        ("nan", "cannot be read"),
        ("0x10", "cannot be read"),
        ("1e999", "must be finite"),
        (math.nan, "must be finite"),
        (math.inf, "must be finite"),
        (-1, "between 0 and"),
        (-0.5, "between 0 and"),
        (2**63, "between 0 and"),
        ("8388608TiB", "between 0 and"),
        (True, "must be bytes"),
        (None, "must be bytes"),
        (b"12GiB", "must be bytes"),
        (1j, "must be bytes"),
        ([], "must be bytes"),
    ],
)
def test_refused(value: object, message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        parse_bytes(value)


def test_message_names_the_argument() -> None:
    with pytest.raises(BudgetError, match=r"^host_budget='much' cannot be read"):
        parse_bytes("much", "host_budget")


@given(st.integers(0, 2**20), st.sampled_from(sorted(UNITS)), st.booleans())
def test_whole_numbers_are_exact(number: int, unit: str, lower: bool) -> None:
    text = f"{number} {unit.lower() if lower else unit}"
    assert parse_bytes(text) == number * UNITS[unit]


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        assert 0 <= parse_bytes(text) < 2**63
    except BudgetError as error:
        assert str(error)  # noqa: PT017 (either outcome is fine)


@given(st.integers(0, 2**50))
def test_what_is_written_can_be_read(nbytes: int) -> None:
    again = parse_bytes(format_bytes(nbytes))
    assert again == pytest.approx(nbytes, rel=0.006, abs=0)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (-(2**20), "-1.00 MiB"),
        (2**50, "1024.00 TiB"),
    ],
)
def test_format_bytes(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.00 s"), (1.5, "1.50 s"), (60, "60.0 s"), (0.0545, "54.5 ms"), (2e-6, "2.00 µs")],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.floats(1e-9, 1e6))
def test_format_seconds_keeps_three_digits(seconds: float) -> None:
    number, unit = format_seconds(seconds).split()
    factor = {"s": 1, "ms": 1e3, "µs": 1e6}[unit]
    assert float(number) / factor == pytest.approx(seconds, rel=0.01, abs=1e-8)
