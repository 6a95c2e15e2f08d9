"""Settings of every test: repeatable random examples, and GPU tests only where there is a GPU."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch is loaded, and for child processes. Tensors are tiny here and workers share the
# cores, where threads of torch's mostly wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def _own_cache() -> None:
    """Links that are probed beside tests must not be remembered for anything else.

    Workers and child processes take the folder from the environment of the process that made it.
    Matplotlib's fonts stay where they are: finding them takes seconds.
    """
    if "BELADY_TESTS_CACHE" in os.environ:
        return
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("MPLCONFIGDIR", str(home / "matplotlib"))
    folder = tempfile.mkdtemp(prefix="belady-tests-")
    os.environ["BELADY_TESTS_CACHE"] = os.environ["XDG_CACHE_HOME"] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


_own_cache()

# A run says the same twice; `pytest --hypothesis-profile=thorough` looks further.
settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "thorough",
    deadline=None,
    max_examples=2000,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def settable_backend_flags() -> None:
    """Importing torch's operator database forbids setting backend flags, for the whole process."""
    if "torch.backends" in sys.modules:
        forbid = sys.modules["torch.backends"].disable_global_flags
        forbid.__globals__["__allow_nonbracketed_mutation_flag"] = True


@pytest.fixture(scope="session", autouse=True)
def freed_memory_kept() -> None:
    """No test asks the system what this process holds; what it is given back comes page by page.

    Processes of their own do (`faults/`). Of `test_cutting.py`'s 17 s in the kernel it saves 6.
    """
    if "belady.memory.cap" in sys.modules:
        sys.modules["belady.memory.cap"]._return_freed_memory = lambda: None


@pytest.fixture(scope="session", autouse=True)
def guards_not_timed() -> None:
    """Dynamo flushes the processor's caches at each capture, to log how long its guards take."""
    if "torch._dynamo.guards" in sys.modules:
        sys.modules["torch._dynamo.guards"].profile_guard_manager = lambda *_: 0.0


@pytest.fixture(scope="module", autouse=True)
def what_stays_not_looked_through() -> Iterator[None]:
    """What the tests of a file leave behind, for the most part Dynamo's, stays to the end.

    Of files of tests that collect, seven in a row, it saves two thirds of the collector's seconds.
    """
    yield
    _pass_over()


def _pass_over() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def nothing_left_running(what_stays_not_looked_through: None) -> Iterator[None]:
    """A thread that outlives its tests would show in a later leak check, or not, by luck."""
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not [name for name in left if name.startswith(("belady", "lane"))]


@pytest.fixture(scope="module", autouse=True)
def nothing_held_by_save_on(nothing_left_running: None) -> Iterator[None]:
    """What `save_on` keeps for its next use must not show in other modules' leak checks."""
    yield
    if "belady.eager.save_on" in sys.modules:
        sys.modules["belady.eager.save_on"].release()


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Where code was compiled nothing is recomputed: each test has a process of its own in this."""
    yield
    calls = sys.modules.get("belady.measure.calls")
    if calls is not None and (calls.compiled_anything() or calls.frames_compiled()):
        sys.modules["torch._dynamo"].reset()
        # What engines of the test had compiled is forgotten with the rest.
        calls.compiled_anything()


def pytest_collection_finish() -> None:
    """Half a million objects of torch and of tests, for the collector to look through each time.

    A retry, a plan refused and a graph captured each collect everything once: of 67 s that
    `test_step.py` and `test_owners.py` took in a run that had loaded all tests, 46 went there.
    """
    _pass_over()
    # What is new is looked at less often: captures and traces make much that stays.
    # Tests of what is let go of collect, or forbid it, themselves.
    gc.set_threshold(50_000, 20, 100)
    # To loggers that do not propagate pytest listens itself; and if anybody listens to this one
    # torch writes down all that it compiles, for each step of which it prints whole graphs.
    logging.getLogger("torch.__trace").propagate = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
