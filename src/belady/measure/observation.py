"""One observed iteration, from its first pass to the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_leaves

from belady.ir.trace import Phase, Source, StorageKind, Trace
from belady.measure.clock import Clock
from belady.measure.key import gradients_in
from belady.measure.modules import RootCall, module_paths
from belady.measure.observe import assemble, held_bytes
from belady.measure.recorder import Recorder
from belady.measure.sums import only_holder, unwatched
from belady.measure.trials import Trials
from belady.measure.uninitialized import initialized
from belady.memory.contents import Moved, Packed


class Observation:
    """Records an iteration and turns it into a Trace.

    Parameters
    ----------
    device
        Compute device.
    clock
        Brackets every op.
    modules
        The roots, whose parameters and buffers are persistent.
    trials
        Learns which ops can be run again; None leaves that out.

    Attributes
    ----------
    on_interrupted
        Called where the program goes on after a root ended without a word; None: do not look.
    """

    def __init__(
        self,
        device: torch.device,
        clock: Clock,
        modules: Iterable[torch.nn.Module],
        trials: Trials | None = None,
    ) -> None:
        self.recorder = Recorder(device, clock, trials)
        if device.type != "cpu":
            self.recorder.alone = only_holder(device)
        self.roots: list[str] = []
        self.on_interrupted: Callable[[], None] | None = None
        self._modules = list(modules)
        self._paths = ExitStack()
        self._held_before = _allocated(device)
        self._attached = False

    def start(self) -> None:
        """Begin to watch this thread; autograd carries the mode to the threads of backward."""
        self._adopt_state()
        # Below the user's modes, whose blocks may end before the iteration does: each of them pops
        # whatever is on top.
        above = [_pop_mode() for _ in _get_current_dispatch_mode_stack()]
        self.recorder.__enter__()  # type: ignore[no-untyped-call]
        for mode in reversed(above):
            _push_mode(mode)
        self._attached = True

    def enter_pass(self, module: torch.nn.Module, call: tuple[Any, Any]) -> None:
        """Root ``module`` is called with ``call = (args, kwargs)``."""
        recorder = self.recorder
        recorder.pass_index = len(self.roots)
        recorder.phase = Phase.FORWARD
        self.roots.append(type(module).__name__)
        for tensor in tree_leaves(call):
            if isinstance(tensor, torch.Tensor):
                recorder.adopt_new(tensor, StorageKind.INPUT)
        if self.on_interrupted is not None:
            recorder.call = RootCall(module)
            self._paths.callback(register_module_forward_pre_hook(self._module_begins).remove)
        self._paths.enter_context(module_paths(module, recorder.modules))

    def leave_pass(self) -> None:
        """The root returned."""
        self._end_call()
        self.recorder.phase = Phase.LOSS

    def brought(self, content: Moved | Packed) -> None:
        """The bytes of a content were asked back, or are held in fewer."""
        if isinstance(content, Packed):
            self.recorder.made(content.encoded.data)
        elif content.arrival is not None:
            self.recorder.brought(content, content.arrival.tensor)

    def stop(self) -> None:
        """Stop watching, in whatever order modes were put on this thread. Idempotent."""
        if not self._attached:
            return
        self._attached = False
        self._end_call()
        above = []
        while self.recorder in (stack := _get_current_dispatch_mode_stack()):
            if stack[-1] is self.recorder:
                self.recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                break
            above.append(_pop_mode())
        for mode in reversed(above):
            _push_mode(mode)

    def finish(self, optimizer: torch.optim.Optimizer | None) -> Trace:
        """Stop watching and give the Trace."""
        self.stop()
        self._adopt_gradients()
        if optimizer is not None:
            for state in optimizer.state.values():
                for tensor in tree_leaves(state):
                    if isinstance(tensor, torch.Tensor):
                        self.recorder.adopt(tensor, StorageKind.STATE)
        storages = self.recorder.storages
        known = sum(
            storages[value.storage].nbytes
            for value in self.recorder.values
            if value.producer < 0 and value.version == 0
        )
        unseen = max(0, self._held_before - known) if self._held_before else 0
        trace = assemble(self.recorder, tuple(self.roots), Source.EAGER, unseen)
        return unwatched(trace, self.recorder.ops)

    def peak_bytes(self, round_bytes: int) -> int:
        """Most bytes really held during one op, by count of live storages."""
        return max(held_bytes(self.recorder, round_bytes), default=0)

    def _module_begins(self, *_: Any) -> None:
        """See whether the program goes on elsewhere; inside an op no mode can be taken off."""
        if torch.compiler.is_compiling():
            return  # or it would become part of what is compiled
        call = self.recorder.call
        with self.recorder.aside():
            over = call is not None and call.is_over()
        if over and self.recorder in _get_current_dispatch_mode_stack() and self.on_interrupted:
            self.on_interrupted()

    def _end_call(self) -> None:
        self.recorder.call = None
        self._paths.close()

    def _adopt_state(self) -> None:
        for module in self._modules:
            for parameter in initialized(module.parameters()):
                self.recorder.adopt(parameter, StorageKind.PARAMETER)
            for buffer in initialized(module.buffers()):
                self.recorder.adopt(buffer, StorageKind.BUFFER)
        self._adopt_gradients()

    def _adopt_gradients(self) -> None:
        for gradient in gradients_in(self._modules):
            self.recorder.adopt(gradient, StorageKind.GRADIENT)


class Watched:
    """A handle whose end is told to the recorder."""

    __slots__ = ("handle", "recorder", "save")

    def __init__(self, handle: Any, save: int, recorder: Recorder) -> None:
        self.handle = handle
        self.save = save
        self.recorder = recorder

    def __del__(self) -> None:
        self.recorder.dropped(self.save)


def watched(
    recorder: Recorder, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """Wrap a pair of hooks so that ``recorder`` learns of every save, read and drop."""
    ordinals: dict[int, int] = {}

    def pack_and_tell(tensor: torch.Tensor) -> Any:
        with recorder.aside():
            index = recorder.pass_index
            ordinal = ordinals.get(index, 0)
            ordinals[index] = ordinal + 1
            save = recorder.packed(tensor, index, ordinal)
            handle = pack(tensor)
            # A content dies with its handles, so an address in use names one content.
            recorder.contents[id(getattr(handle, "content", handle))] = save
        return Watched(handle, save, recorder)

    def unpack_and_tell(watched: Watched) -> torch.Tensor:
        with recorder.aside():
            recorder.read(watched.save)
            tensor = unpack(watched.handle)
            recorder.reloaded(watched.save, tensor)
        return tensor

    return pack_and_tell, unpack_and_tell


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
