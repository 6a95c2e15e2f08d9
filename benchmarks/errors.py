"""What a command was given and cannot use. Imports no torch."""

from __future__ import annotations


class GivenError(ValueError):
    """An option or a file that cannot be used; the message says which, and what there is."""
