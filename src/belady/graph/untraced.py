"""What programs that look whether they are traced do where they are not.

Hugging Face's models attend by ``is_causal`` in plain PyTorch, unless the user gives a mask. While
they are traced they make one: to look whether it masks anything would break the graph. The rules
are those of ``_ignore_causal_mask_sdpa`` and ``create_causal_mask`` in
``transformers.masking_utils``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from belady.graph.masks import RECKON, SHAPE, Steps, name_of

_MODULE = "transformers.masking_utils"
# As it stands in the calls that lead to an op.
_FILE = re.compile(r"transformers[\\/]masking_utils\.py\"")
# Numbers sequences that are packed in one.
_PACKED = "cumsum"


def attends_without() -> Callable[[Steps], bool]:
    """Says whether plain PyTorch attends without a mask that is made so, of constants alone.

    It does where no window is near that is as long as the sequence, and where positions are seen to
    be those of one sequence. To be called where nothing is traced.
    """
    return partial(_attends_without, _looks_at_positions())


def _attends_without(looks_at_positions: bool, steps: Steps) -> bool:
    *_, decides = (it for it in steps if name_of(it) not in SHAPE)
    if not _FILE.search(decides.stack_trace or ""):
        return False
    keys = steps[-1].meta["example_value"].shape[-1]
    reckoned = [it for it in steps if name_of(it) in RECKON]
    if any(_is_number(arg, keys) for it in reckoned for arg in it.args):
        return False
    return looks_at_positions or all(name_of(it) != _PACKED for it in reckoned)


def _is_number(arg: Any, keys: int) -> bool:
    return isinstance(arg, int) and abs(arg) == keys


def _looks_at_positions() -> bool:
    """Whether this version sees that positions are of one sequence."""
    find = getattr(sys.modules.get(_MODULE), "find_packed_sequence_indices", None)
    return find is not None and find(torch.arange(2).unsqueeze(0)) is None
