"""The trace of a pass that has not run: a forward and a backward on tensors without bytes."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from belady.errors import TraceError
from belady.ir.trace import Phase, Source, StorageKind, Trace
from belady.measure.clock import NoClock
from belady.measure.key import gradients_of
from belady.measure.modules import module_paths
from belady.measure.observe import assemble
from belady.measure.recorder import Recorder
from belady.measure.resized import Resized
from belady.measure.sums import in_place
from belady.measure.untouched import replace_tensors, untouched


def static_trace(module: torch.nn.Module, call: tuple[Any, Any], device: torch.device) -> Trace:
    """Trace one call of ``module``, a pseudo-loss and its backward, without running them.

    The pseudo-loss sums the outputs that require grad. Nothing is touched: parameters, buffers,
    gradients, random state and the attributes of every submodule are as before. Optimizer state is
    not known yet: see `belady.measure.held`.

    Parameters
    ----------
    call
        ``(args, kwargs)`` of the call.

    Raises
    ------
    TraceError
        If the call cannot be faked (data-dependent code, an op without a fake); the cause says why.
    """
    recorder = Recorder(device, NoClock())
    record(module, call, recorder)
    trace = static_document(module, recorder)
    if trace.device == "cpu":
        return trace
    # As the observed iteration is going to add them up.
    return in_place(trace, (at for at, op in enumerate(recorder.ops) if op.into_first))


def static_document(module: torch.nn.Module, recorder: Recorder) -> Trace:
    """Trace of a call of ``module`` that `record` has recorded."""
    unseen = library_bytes(recorder.device)
    return assemble(recorder, (type(module).__name__,), Source.STATIC, unseen)


def record(
    module: torch.nn.Module,
    call: tuple[Any, Any],
    recorder: Recorder,
    resized: Resized | None = None,
) -> None:
    """Record what `static_trace` assembles.

    Parameters
    ----------
    recorder
        A new one.
    resized
        Other sizes for the tensors in the call.

    Raises
    ------
    TraceError
        See `static_trace`.
    """
    try:
        with (
            _quiet(),
            untouched(module, call, recorder.device) as containers,
            FakeTensorMode() as fake,
        ):
            # In place of the real ones until backward is over, which may call modules again.
            replace_tensors(containers, lambda tensor: _faked_if_possible(tensor, fake))
            parameters = list(module.parameters())
            _adopt_state(module, recorder)
            faked = tree_map_only(torch.Tensor, lambda tensor: _faked(tensor, fake, resized), call)
            for tensor in tree_leaves(faked):
                if isinstance(tensor, torch.Tensor):
                    recorder.adopt_new(tensor, StorageKind.INPUT)
            _forward_backward(module, faked, recorder)
            with recorder.aside():
                for gradient in gradients_of(parameters):
                    if gradient is not None:
                        recorder.adopt(gradient, StorageKind.GRADIENT)
    except Exception as error:
        raise TraceError(
            f"{type(module).__name__} cannot be traced without running it: {error}"
        ) from error


def library_bytes(device: torch.device) -> int:
    """Bytes that cuBLAS takes from torch's allocator for good at its first matrix product.

    One workspace for each thread that issues ops, forward and backward. Torch's default: 32 MiB
    from compute capability 9 on, 8.1 MiB before; ``CUBLAS_WORKSPACE_CONFIG`` names others.
    """
    if device.type != "cuda":
        return 0
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    sizes = re.findall(r":(\d+):(\d+)", config)
    if sizes:
        return 2 * sum(int(kib) * int(count) * 1024 for kib, count in sizes)
    major, _ = torch.cuda.get_device_capability(device)
    return 2 * (32 * 2**20 if major >= 9 else 4096 * 2 * 1024 + 16 * 8 * 1024)


def _forward_backward(module: torch.nn.Module, call: tuple[Any, Any], recorder: Recorder) -> None:
    args, kwargs = call
    with ExitStack() as stack:
        # On one thread, so that the recorder sees backward whatever the device.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        # Code compiled for tensors without bytes would be of no use to the real call.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_without_cudnn_of(module))
        stack.enter_context(module_paths(module, recorder.modules))
        stack.enter_context(recorder)
        with saved_tensors_hooks(*_hooks(recorder)):
            result = module(*args, **kwargs)
        recorder.phase = Phase.LOSS
        # As at the end of the user's autocast block, which comes before backward.
        torch.clear_autocast_cache()
        outputs = [tensor for tensor in tensors_of(result) if tensor.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


@contextmanager
def _without_cudnn_of(module: torch.nn.Module) -> Iterator[None]:
    """Trace recurrent layers as native ops.

    cuDNN's dropout state is made once for all layers of the process, out of reach of any mode: made
    here, it would be without bytes for good; made before, it cannot be used here.
    """
    recurrent = any(isinstance(part, torch.nn.RNNBase) for part in module.modules())
    enabled = torch.backends.cudnn.enabled
    torch._C._set_cudnn_enabled(enabled and not recurrent)
    try:
        yield
    finally:
        torch._C._set_cudnn_enabled(enabled)


def _adopt_state(module: torch.nn.Module, recorder: Recorder) -> None:
    for parameter in module.parameters():
        recorder.adopt(parameter, StorageKind.PARAMETER)
    for buffer in module.buffers():
        recorder.adopt(buffer, StorageKind.BUFFER)


def _faked_if_possible(tensor: torch.Tensor, fake: FakeTensorMode) -> torch.Tensor:
    try:
        return fake.from_tensor(tensor)
    except Exception:
        # Perhaps the call does not use it; if it does, the mode refuses it.
        return tensor


def _faked(tensor: torch.Tensor, fake: FakeTensorMode, resized: Resized | None) -> torch.Tensor:
    return fake.from_tensor(tensor) if resized is None else resized.empty(tensor)


def tensors_of(result: Any) -> Iterator[torch.Tensor]:
    """Tensors that a module returned, be it in an object with attributes."""
    for leaf in tree_leaves(result):
        held = (
            [leaf] if isinstance(leaf, torch.Tensor) else tree_leaves(getattr(leaf, "__dict__", ()))
        )
        yield from (item for item in held if isinstance(item, torch.Tensor))


class _Saved:
    """Stands for a saved tensor.

    A strided one is not held, so that its storage dies when forward drops it; ``kept`` holds any
    other.
    """

    def __init__(self, tensor: torch.Tensor, save: int, recorder: Recorder) -> None:
        self.save = save
        self.recorder = recorder
        self.kept: torch.Tensor | None = None
        if tensor.layout is torch.strided:
            self.geometry = (tensor.shape, tensor.stride())
            self.dtype, self.device = tensor.dtype, tensor.device
            self.bits = (tensor.is_conj(), tensor.is_neg())
        else:
            self.kept = tensor.detach()

    def take(self) -> torch.Tensor:
        """Give a tensor like the one saved."""
        if self.kept is not None:
            return self.kept
        tensor = torch.empty_strided(*self.geometry, dtype=self.dtype, device=self.device)
        conj, neg = self.bits
        tensor = torch._conj(tensor) if conj else tensor
        return torch._neg_view(tensor) if neg else tensor

    def __del__(self) -> None:
        self.recorder.dropped(self.save)


def _hooks(recorder: Recorder) -> tuple[Any, Any]:
    def pack(tensor: torch.Tensor) -> Any:
        save = recorder.packed(tensor, 0, len(recorder.saves))
        return _Saved(tensor, save, recorder)

    def unpack(saved: _Saved) -> torch.Tensor:
        recorder.read(saved.save)
        with recorder.aside():
            tensor = saved.take()
        recorder.reloaded(saved.save, tensor)
        return tensor

    return pack, unpack


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging what cannot be faked: the call itself will say what is wrong."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
