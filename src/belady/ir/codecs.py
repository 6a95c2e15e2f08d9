"""The lossless encodings of saved values: their names, sizes and costs."""

from __future__ import annotations

from typing import NamedTuple

from belady.ir.plan import Encode

# A bit an element: of floats, whether it is at most 0, which is all that the gradient of a ReLU
# asks; of bools, itself.
SIGN, BITS = "sign", "bits"
# Integers in a narrower type: its bytes, and how many numbers from 0 on it holds.
NARROW = {"uint8": (1, 1 << 8), "uint16": (2, 1 << 16), "int32": (4, 1 << 31)}

# Elements that are turned into bits at once: what is held meanwhile is as many bytes.
PIECE = 1 << 25


class Encoding(NamedTuple):
    """How a value can be held, and in how many bytes."""

    codec: str
    nbytes: int


class Passes(NamedTuple):
    """Device bytes that are read and written to encode and to decode, and most held meanwhile."""

    encode: int
    decode: int
    scratch: int


def passes(decision: Encode, nbytes: int) -> Passes:
    """What it costs to hold a value of ``nbytes`` bytes as ``decision`` says."""
    if decision.codec not in (SIGN, BITS):
        return Passes(nbytes + decision.nbytes, nbytes + decision.nbytes, 0)
    # A byte an element is made (of a mask: read), multiplied in place, and one in eight is kept;
    # on the way back each byte becomes eight, which change in place twice and are compared. Work on
    # bytes reaches two thirds of the bandwidth on an H200: they count half as much again.
    elements = 8 * decision.nbytes
    return Passes(
        encode=nbytes + 6 * elements + decision.nbytes,
        decode=nbytes + 9 * elements + decision.nbytes,
        scratch=min(elements, PIECE),
    )
