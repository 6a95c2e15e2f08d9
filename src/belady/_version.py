"""The version, here only: packaging reads this file, and it needs no installed metadata."""

__version__ = "0.1.0"
