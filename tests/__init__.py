"""Tests of belady; helpers shared between them are in `tests.support`."""
