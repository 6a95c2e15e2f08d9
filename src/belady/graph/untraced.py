"""What programs that look whether they are traced do where they are not.

Hugging Face's models attend by ``is_causal`` in plain PyTorch, unless the user gives a mask. While
they are traced they make one: to look whether it masks anything would break the graph. The rules
are those of ``create_causal_mask`` and its like in ``transformers.masking_utils``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import partial
from linecache import getlines
from pathlib import PurePath

import torch
from torch import fx

from belady.graph.grouped import calls_to, repeated, shares_without_mask
from belady.graph.masks import SHAPE, Leaves, Steps, name_of

_MODULE = "transformers.masking_utils"
_FILE, _WRAPPERS = ("transformers", "masking_utils.py"), ("transformers", "utils")
_CREATE, _MAKES = {"create_causal_mask", "create_sliding_window_causal_mask"}, "sdpa_mask"
# What a file that asks for a mask may say so that plain PyTorch is given it, too.
_FORBIDS = re.compile("allow_is_causal_skip|(or|and)_mask_function|block_sequence_ids")
# Numbers sequences that are packed in one; finds where a window begins.
_PACKED, _BACK = "cumsum", "sub"


def attends_without() -> Leaves:
    """Says whether plain PyTorch attends without a mask that is made so, of constants alone.

    It does where a model asks for the past alone, or for a window in it that is longer than the
    sequence, and where positions are seen to be those of one sequence. To be called where nothing
    is traced.
    """
    return partial(_attends_without, _looks_at_positions())


def _attends_without(looks_at_positions: bool, attention: fx.Node, steps: Steps) -> bool:
    repeats = repeated(attention)
    if repeats and shares_without_mask(repeats) is None:
        return False
    if not looks_at_positions and any(name_of(it) == _PACKED for it in steps):
        return False
    keys = steps[-1].meta["example_value"].shape[-1]
    if any(keys in it.args for it in steps if name_of(it) == _BACK):
        # Plain PyTorch is given a window that is as long as the sequence.
        return False
    *_, decides = (it for it in steps if name_of(it) not in SHAPE)
    return _asks_for_the_past(_calls(decides))


def _asks_for_the_past(calls: Sequence[tuple[str, str]]) -> bool:
    """Whether the calls that made a mask are those of a model that asks for nothing else."""
    functions = [it for _, it in calls]
    at = next((at for at, it in enumerate(functions) if it in _CREATE), 0)
    asking, making = calls[:at], calls[at:]
    if not asking or not all(_is_theirs(file) for file, _ in making):
        return False
    named = functions[at + 1 : at + 2] == [_MAKES] and not _is_theirs(asking[-1][0])
    return named and not any(map(_FORBIDS.search, getlines(asking[-1][0])))


def _calls(node: fx.Node) -> list[tuple[str, str]]:
    """Files and functions of the calls that lead to it, the innermost last; without wrappers."""
    calls = calls_to(node)
    return [(file, name) for file, name in calls if PurePath(file).parts[-3:-1] != _WRAPPERS]


def _is_theirs(file: str) -> bool:
    return PurePath(file).parts[-2:] == _FILE


def _looks_at_positions() -> bool:
    """Whether this version sees that positions are of one sequence."""
    find = getattr(sys.modules.get(_MODULE), "find_packed_sequence_indices", None)
    return find is not None and find(torch.arange(2).unsqueeze(0)) is None
