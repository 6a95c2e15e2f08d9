"""Watches one iteration op by op: a dispatch mode, fed by the saved-tensor hooks as well.

It costs some tens of microseconds an op, so it is on for the first iterations only. It records
facts; `belady.measure.observe` turns them into a Trace.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from belady.ir.trace import Mode, Phase, StorageKind, Use
from belady.measure.algorithms import Algorithms
from belady.measure.clock import Clock
from belady.measure.modules import RootCall
from belady.measure.records import (
    RawOp,
    RawSave,
    RawStorage,
    RawValue,
    draws,
    mutated,
    need_of,
    newest_node,
    tensors_in,
    written_arguments,
)
from belady.measure.restraint import Issue, at_once
from belady.measure.sums import INTO, Holds, adds_nothing, may_sum, nobody
from belady.measure.trials import Trials
from belady.memory.geometry import shape_of

# Autograd's bookkeeping: no kernel, no bytes, and not the same number in every mode.
_DETACH = torch.ops.aten.detach.default


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records ops, storages, values and saves of one iteration.

    Parameters
    ----------
    device
        Compute device; storages elsewhere are not recorded.
    clock
        Brackets every op.
    trials
        Runs ops once more, to learn which of them give the same bits.

    Attributes
    ----------
    issue, alone
        Calls an op; tells of a sum of gradients whether it may write the first.
    algorithms
        Tries convolutions with less workspace, or None.
    owners
        Tensors that were adopted, by storage.
    call
        The call of a root that is under way, or None.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile work as it does unwatched, and watch what its code runs."""
        return True

    def __init__(self, device: torch.device, clock: Clock, trials: Trials | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.clock = clock
        self.trials = trials
        self.issue: Issue = at_once
        self.alone: Holds = nobody
        self.algorithms: Algorithms | None = None
        self.ops: list[RawOp] = []
        self.storages: list[RawStorage] = []
        self.values: list[RawValue] = []
        self.saves: list[RawSave] = []
        self.phase = Phase.FORWARD
        self.pass_index = 0
        self.modules: list[str] = []
        self.call: RootCall | None = None
        self.paused = 0
        self.contents: dict[int, int] = {}
        self.owners: dict[int, weakref.ref[torch.Tensor]] = {}
        self._present: dict[int, int] = {}  # value by address of its bytes
        self._anchored: list[Any] = []
        self._last = perf_counter()
        self._writes: dict[Any, frozenset[int | str]] = {}

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Work of belady's own: neither recorded nor counted as the host's time."""
        begun = perf_counter()
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1
            self._last += perf_counter() - begun

    def packed(self, tensor: torch.Tensor, pass_index: int, ordinal: int) -> int:
        """Autograd saves ``tensor``; gives the number of this save."""
        value = self._value_of(tensor)
        strided = tensor.layout is torch.strided and not tensor.is_nested
        save = RawSave(
            value,
            pass_index,
            ordinal,
            len(self.ops),
            newest_node(),
            self.modules[-1] if self.modules else "",
            shape_of(tensor),
            tuple(tensor.stride()) if strided else (),
            int(tensor.storage_offset()) if strided else 0,
            str(tensor.dtype).removeprefix("torch."),
            tensor._version,
        )
        self.saves.append(save)
        return len(self.saves) - 1

    def read(self, save: int) -> None:
        """Backward takes the saved value back."""
        self.saves[save].reads.append(len(self.ops))

    def dropped(self, save: int) -> None:
        """Autograd lets go of the saved value."""
        self.saves[save].dropped = len(self.ops)

    def reloaded(self, save: int, tensor: torch.Tensor) -> None:
        """The bytes of a saved value exist again, as the storage of ``tensor``."""
        value = self.saves[save].value
        if value < 0 or not self._visible(tensor):
            return
        # Kept bytes have been the storage all along, at their own latest version.
        if self._storage_of(tensor) != self.values[value].storage:
            self._watch(tensor.untyped_storage(), value, birth=len(self.ops))

    def brought(self, content: object, tensor: torch.Tensor) -> None:
        """The bytes of a moved content were asked back, to be the storage of ``tensor``."""
        save = self.contents.get(id(content))
        if save is not None:
            self.reloaded(save, tensor)

    def made(self, tensor: torch.Tensor) -> None:
        """The engine has made a tensor for itself, and holds it from the next op on."""
        self._born(tensor, StorageKind.OTHER, producer=len(self.ops))

    def adopt(self, tensor: torch.Tensor, kind: StorageKind) -> None:
        """Make a tensor known that exists before the iteration, or say what it is for."""
        if not self._visible(tensor):
            return
        storage = self._storage_of(tensor)
        if storage < 0:
            self._born(tensor, kind, producer=-1)
        else:
            self.storages[storage].kind = kind
        self.owners[self._storage_of(tensor)] = weakref.ref(tensor)

    def adopt_new(self, tensor: torch.Tensor, kind: StorageKind) -> None:
        """Make a tensor known that exists before the iteration, unless it is known already."""
        if self._visible(tensor) and self._storage_of(tensor) < 0:
            self.adopt(tensor, kind)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        gap = perf_counter() - self._last
        kwargs = kwargs or {}
        unseen = self.paused or func.namespace == "prim" or func is _DETACH
        if unseen or (self.call is not None and self.call.is_over()):
            return func(*args, **kwargs)  # no mode can be taken off inside it
        op = self._begin(func, args, kwargs, gap)
        if op.into_first and self.alone(args):
            func, op.name, op.may_sum = INTO, str(INTO), False
        trials = self.trials if op.phase in (Phase.FORWARD, Phase.LOSS) else None
        recipe = trials.draft(func, args, kwargs, self._value_of) if trials is not None else None
        self.clock.start()
        called = perf_counter()
        try:
            result = self.issue(func, args, kwargs)
        finally:
            # An op that raises has begun too.
            if self.device.type != "cpu":
                # On a CPU the call is the op itself; elsewhere it only issues the op.
                op.host_seconds += perf_counter() - called
            self.clock.stop()
        self._end(op, func, args, kwargs, result)
        with self.aside():
            at = len(self.ops) - 1
            if trials is not None and recipe is not None:
                trials.learn(at, recipe, args, kwargs, result, self._value_of)
            if self.algorithms is not None:
                self.algorithms.learn(at, (func, args, kwargs), result, self.clock.workspace)
        self._last = perf_counter()
        return result

    def _begin(self, func: Any, args: tuple[Any, ...], kwargs: Any, gap: float) -> RawOp:
        node: Any = torch._C._current_autograd_node()
        backward = node is not None and self.phase is not Phase.OPTIMIZER
        replay = backward and torch.is_grad_enabled()
        name = str(func)
        op = RawOp(
            name,
            self.modules[-1] if self.modules and not backward else "",
            Phase.BACKWARD if backward else self.phase,
            self.pass_index,
            Mode.REPLAY if replay else Mode.NORMAL,
            gap,
            node._sequence_nr() if backward else newest_node(),
            random=draws(func, args, kwargs),
            communicates=name.startswith(("c10d", "_c10d_functional")),
            may_sum=backward and not replay and may_sum(name),
        )
        op.into_first = op.may_sum and adds_nothing(node)
        operands = list(tensors_in((*args, *kwargs.values())))
        reads = []
        for position, tensor in enumerate(operands):
            value = self._value_of(tensor)
            if value >= 0:
                reads.append(value)
                self.values[value].uses.append(Use(len(self.ops), need_of(name, args, position)))
        op.reads = tuple(dict.fromkeys(reads))
        self.ops.append(op)
        return op

    def _end(self, op: RawOp, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        producer = len(self.ops) - 1
        known = self._writes.get(func)
        if known is None:
            known = self._writes[func] = written_arguments(func)
        written = [self._rewritten(tensor) for tensor in tensors_in(mutated(known, args, kwargs))]
        op.mutates = bool(written)
        written += [
            self._born(tensor, None, producer)
            for tensor in tensors_in((result,))
            if self._visible(tensor) and self._storage_of(tensor) < 0
        ]
        op.writes = tuple(dict.fromkeys(value for value in written if value >= 0))

    def _visible(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.device.type == self.device.type
            and tensor.layout is torch.strided
            and torch._C._has_storage(tensor)
        )

    def _storage_of(self, tensor: torch.Tensor) -> int:
        """Number of the tensor's storage; -1 when it is not known yet."""
        value = self._present.get(tensor.untyped_storage()._cdata, -1)
        return -1 if value < 0 else self.values[value].storage

    def _value_of(self, tensor: torch.Tensor) -> int:
        """Present value of the tensor's storage; -1 for what is not recorded."""
        if not self._visible(tensor):
            return -1
        value = self._present.get(tensor.untyped_storage()._cdata)
        # First seen as an operand: it was there before the iteration.
        return self._born(tensor, None, producer=-1) if value is None else value

    def _born(self, tensor: torch.Tensor, kind: StorageKind | None, producer: int) -> int:
        storage = tensor.untyped_storage()
        self.values.append(RawValue(len(self.storages), 0, producer))
        self.storages.append(RawStorage(str(tensor.device), storage.nbytes(), kind))
        value = len(self.values) - 1
        self._watch(storage, value, birth=max(producer, 0))
        return value

    def _rewritten(self, tensor: torch.Tensor) -> int:
        before = self._value_of(tensor)
        if before < 0:
            return -1
        index = self.values[before].storage
        storage = self.storages[index]
        storage.version += 1
        self.values.append(RawValue(index, storage.version, len(self.ops) - 1))
        value = self._present[tensor.untyped_storage()._cdata] = len(self.values) - 1
        return value

    def _watch(self, storage: torch.UntypedStorage, value: int, birth: int) -> None:
        life = [birth, -1]
        self.storages[self.values[value].storage].lives.append(life)
        self._present[storage._cdata] = value

        def gone(_: Any) -> None:
            life[1] = len(self.ops)

        # The StorageWeakRef keeps the address from being used again, so that an address names
        # one storage for as long as the recorder lives; the Python weak reference tells of death.
        anchor = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._anchored.append((anchor, weakref.ref(storage, gone)))
