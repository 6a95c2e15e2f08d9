"""TRL's OffloadActivations: copies on a stream of their own, without a plan or a budget."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from benchmarks.peers.base import Applied, Peer, hooks_as_found, missing, needs_cuda
from benchmarks.workloads import Workload

_FILE = "models/activation_offloading.py"


def _available(work: Workload) -> str | None:
    return needs_cuda(work) or missing("trl", "accelerate", "transformers")


def _load() -> ModuleType:
    """The one file, without the package around it, which needs half of Hugging Face's."""
    name = "belady_benchmarks_trl_activation_offloading"
    if name in sys.modules:
        return sys.modules[name]
    package = find_spec("trl")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("trl")
    spec = spec_from_file_location(name, Path(package.submodule_search_locations[0]) / _FILE)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"trl has no {_FILE}")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module


@contextmanager
def _applied(work: Workload) -> Iterator[Applied]:
    from accelerate import PartialState

    PartialState()  # its logger refuses to speak without one
    with hooks_as_found(work.model):
        offload = _load().get_act_offloading_ctx_manager(work.model, warn_if_no_head=False)
        # TRL's trainer has the whole training step inside; leaving clears what backward needs.
        yield Applied(work.model, lambda: offload, backward_inside=True)


PEERS = (Peer("trl", "trl.models.activation_offloading, defaults", _available, _applied),)
