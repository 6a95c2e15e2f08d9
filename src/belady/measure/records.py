"""Raw facts of a watched iteration, as the recorder writes them down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from belady.ir.encoding import POOLINGS
from belady.ir.trace import Mode, Need, Phase, StorageKind, Use

_UNEQUAL = "aten.ne.Scalar"
_THRESHOLD = "aten.threshold_backward.default"
_POOLINGS = frozenset(it.replace(".default", "_backward.default") for it in POOLINGS)


@dataclass(slots=True)
class RawOp:
    """One op as seen by the mode.

    ``may_sum`` says whether this can be autograd adding up gradients, in a new tensor, and
    ``into_first`` whether it is that for certain.
    """

    name: str
    module: str
    phase: Phase
    pass_index: int
    mode: Mode
    host_seconds: float
    sequence: int
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    random: bool = False
    mutates: bool = False
    communicates: bool = False
    may_sum: bool = False
    into_first: bool = False


@dataclass(slots=True)
class RawStorage:
    """One storage; ``lives`` are the ``[birth, death]`` of its bytes, death -1 while they live.

    There are several when its bytes were moved away and came back.
    """

    device: str
    nbytes: int
    kind: StorageKind | None
    lives: list[list[int]] = field(default_factory=list)
    version: int = 0


@dataclass(slots=True)
class RawValue:
    """Content of a storage between two writes."""

    storage: int
    version: int
    producer: int
    uses: list[Use] = field(default_factory=list)


@dataclass(slots=True)
class RawSave:
    """One call of the pack hook and what became of it."""

    value: int
    pass_index: int
    ordinal: int
    packed: int
    sequence: int
    module: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str
    version: int = 0
    reads: list[int] = field(default_factory=list)
    dropped: int | None = None


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Tensors of the arguments or results of an op, in order."""
    for item in tree:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from tensors_in(item)


def need_of(name: str, args: tuple[Any, ...], position: int) -> Need:
    """What op ``name`` reads of its tensor operand ``position``, when that can be less than all."""
    if name == _THRESHOLD and position == 1 and args[2:] == (0,):
        return Need.SIGN  # the gradient of relu asks whether its result is positive
    if name == _UNEQUAL and position == 0 and args[1:] == (0,):
        return Need.SIGN  # so does this, of a value that is never below zero
    if name in _POOLINGS and position == 1:
        return Need.SHAPE
    return Need.VALUES


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call asks a random generator for numbers: attention does for its dropout alone."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else argument.default_value
            return bool(kwargs.get(argument.name, given))
    return True


def written_arguments(func: Any) -> frozenset[int | str]:
    """Positions and names of the arguments that an operator writes to."""
    schema = getattr(func, "_schema", None)
    names: set[int | str] = set()
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            names |= {position, argument.name}
    return frozenset(names)


def mutated(names: frozenset[int | str], args: tuple[Any, ...], kwargs: Any) -> list[Any]:
    """Arguments of a call that `written_arguments` names."""
    if not names:
        return []
    positional = [argument for position, argument in enumerate(args) if position in names]
    return positional + [kwargs[name] for name in kwargs if name in names]


def newest_node() -> int:
    """Number of the autograd node that this thread made last: every node takes the next one."""
    return torch._C._autograd._get_sequence_nr() - 1
