"""Python's own part of running a script: what it finds of itself, and what it finds elsewhere."""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import runpy
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from types import ModuleType


@contextmanager
def as_main(path: str, arguments: Sequence[str], module: bool) -> Iterator[Callable[[], object]]:
    """Set ``sys.argv`` and ``sys.path`` as python does; gives what runs the script."""
    argv, search, entries = sys.argv, sys.path, list(sys.path)
    if not module and not os.path.isdir(path):
        open(path, "rb").close()  # now, so that its absence is not taken for the script's error
    try:
        sys.argv = [path, *arguments]
        sys.path[:1] = [os.getcwd() if module else _folder(path)]
        if module:
            _require_module(path)
            yield lambda: runpy.run_module(path, run_name="__main__", alter_sys=True)
        else:
            yield lambda: _run_file(path)
    finally:
        sys.argv, sys.path = argv, search
        sys.path[:] = entries


def _run_file(path: str) -> None:
    """Run a script as python does, which knows it by its absolute path, whatever it is called.

    `runpy.run_path` knows one path for both; it runs what is no text of a program.
    """
    if os.path.isdir(path) or path.endswith(".pyc") or zipfile.is_zipfile(path):
        runpy.run_path(path, run_name="__main__")
        return
    main, before = ModuleType("__main__"), sys.modules["__main__"]
    main.__file__ = os.path.abspath(path)
    main.__dict__.update(__builtins__=builtins, __annotations__={}, __cached__=None)
    main.__loader__ = SourceFileLoader("__main__", main.__file__)
    with io.open_code(main.__file__) as file:
        text = file.read()
    sys.modules["__main__"] = main
    try:
        exec(compile(text, main.__file__, "exec", dont_inherit=True), main.__dict__)
    finally:
        sys.modules["__main__"] = before


def _folder(path: str) -> str:
    real = os.path.realpath(path)
    return real if os.path.isdir(real) else os.path.dirname(real)


def _require_module(name: str) -> None:
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise FileNotFoundError(f"module {name!r} cannot be found: {error}") from error
    if found is None:
        raise FileNotFoundError(f"there is no module {name!r}")
