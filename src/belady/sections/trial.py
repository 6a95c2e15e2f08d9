"""Tries a section on numbers: in slices beside as a whole, on the real modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from belady.errors import SectionError
from belady.ir.plan import Section
from belady.measure.untouched import untouched
from belady.sections.given import Shared
from belady.sections.stages import modules_in
from belady.sections.standins import StandIns
from belady.sections.wrap import Stretch, locate

# Largest difference beside the largest number. Rounding stays below; samples that mix do not. Of
# tf32 and the halves the sum of each slice is rounded before they are added.
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 5e-2,
    torch.bfloat16: 1e-1,
}
_TF32 = 1e-2
# What is smaller, beside the largest number of all, is as good as zero: what a norm makes of a bias
# before it is rounding alone.
_NOTHING = 1e-3
# Beyond this tolerance a wrong gradient can pass for rounding.
_COARSE = 1e-3
# Of each slice: enough to see what mixes them, few enough to fit where the batch does not. The last
# slice has one, as slices of a small batch have, which some code takes for no batch.
_SAMPLES = 2
_ALONE = Shared()


@dataclass(frozen=True, slots=True)
class Trial:
    """Largest differences, each beside the largest number of its tensor.

    Attributes
    ----------
    outputs, gradients, buffers
        What was compared; gradients are those of the input and of the parameters.
    tolerance
        What each may be at most.
    """

    outputs: float
    gradients: float
    buffers: float
    tolerance: float

    @property
    def passes(self) -> bool:
        """Whether rounding explains them."""
        # Not "greater than": nothing compares with NaN.
        gaps = (self.outputs, self.gradients, self.buffers)
        return all(gap <= self.tolerance for gap in gaps)


def trial(model: nn.Module, section: Section, given: Tensor, shared: Shared = _ALONE) -> Trial:
    """Run the first samples of ``given`` through a section, whole and in slices, and compare.

    Where more differs than rounding explains, they run again in float64, and that counts: many
    batch norms one after another magnify what rounding does to a few samples. So they do where
    rounding is so coarse (halves, tf32) that it would explain nearly anything.

    Parameters, buffers, ``.grad``, random state and attributes are as before. Tensor hooks on
    parameters run.

    Parameters
    ----------
    given
        What the first module of the section was called with; two samples a slice are used, and one
        of the last.
    shared
        What else it was called with.

    Raises
    ------
    SectionError
        If outputs, gradients or buffers differ by more than rounding explains, modules keep
        something of a call, or the section refuses to run.
    """
    owner, stretch = locate(model, section, StandIns())
    few = _few(given, stretch)
    count, unit = few.shape[stretch.along], section.unit
    if count < section.slices:
        raise SectionError(
            f"{stretch.name}: {count} {unit}s cannot be tried in {section.slices} slices"
        )
    modules = modules_in(stretch.line(owner))
    few = few.requires_grad_(given.requires_grad)
    with _without_search():
        found = _compared(owner, stretch, few, shared)
        if found.passes:
            if found.tolerance <= _COARSE:
                return found
            # Numbers of twice to four times the size: for as few samples as show the rest.
            stretch = replace(stretch, slices=2)
            few = _few(given, stretch).requires_grad_(given.requires_grad)
        with _in_double(modules), torch.autocast(few.device.type, enabled=False):
            # Where a network magnifies rounding, only rounding is less in double.
            double = few.detach().double().requires_grad_(given.requires_grad)
            exact = _compared(owner, stretch, double, shared.mapped(_double))
    if exact.passes:
        return exact
    raise SectionError(
        f"{stretch.name} cannot run in slices: {found} when it was tried on {count} {unit}s, "
        f"and {exact} in float64"
    )


def _few(given: Tensor, stretch: Stretch) -> Tensor:
    along = stretch.along
    count = min(given.shape[along], _SAMPLES * stretch.slices - 1)
    few = given.detach().narrow(along, 0, count)
    return few.contiguous() if along else few


def _double(item: Any) -> Any:
    return item.double() if isinstance(item, Tensor) and item.is_floating_point() else item


def _compared(owner: nn.Module, stretch: Stretch, few: Tensor, shared: Shared) -> Trial:
    modules = modules_in(stretch.line(owner))
    parameters = [
        parameter
        for module in modules
        for parameter in module._parameters.values()
        if parameter is not None and parameter.requires_grad
    ]

    def once(run: Callable[[Tensor], Tensor]) -> list[list[Tensor | None]]:
        with _restored(stretch.name, modules, few), torch.enable_grad():
            x = few.detach().clone().requires_grad_(few.requires_grad)
            result = run(x)
            wanted = [*([x] if x.requires_grad else []), *dict.fromkeys(parameters)]
            gradients = torch.autograd.grad([result], wanted, [_seed(result)], allow_unused=True)
            buffers = [buffer.clone() for buffer in _buffers(modules)]
            return [[result.detach()], list(gradients), [*buffers]]

    whole = once(lambda x: _tensor(shared.call(partial(stretch.unsectioned, owner), x)))
    cut = once(lambda x: _tensor(shared.call(partial(stretch, owner), x)))
    outputs, gradients, buffers = map(_difference, whole, cut)
    return Trial(outputs, gradients, buffers, _tolerance(whole, few))


@contextmanager
def _without_search() -> Iterator[None]:
    """Have cuDNN take what algorithm it likes.

    It would time all of them for each convolution of a slice, whole and in double, and few of these
    shapes are run again: slices of one sample or two, which keep what was taken here.
    """
    wanted = torch._C._get_cudnn_benchmark()
    torch._C._set_cudnn_benchmark(False)
    try:
        yield
    finally:
        torch._C._set_cudnn_benchmark(wanted)


@contextmanager
def _in_double(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Parameters and buffers of ``modules`` (themselves, not their children) in float64."""
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    doubles: dict[Tensor, Tensor] = {}
    try:
        for module in modules:
            holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for holder in holders:
                for name, tensor in list(holder.items()):
                    if tensor is not None and tensor.is_floating_point():
                        if tensor not in doubles:
                            double = tensor.detach().double()
                            doubles[tensor] = double.requires_grad_(tensor.requires_grad)
                        replaced.append((holder, name, tensor))
                        holder[name] = doubles[tensor]
        yield
    finally:
        for holder, name, tensor in replaced:
            holder[name] = tensor


@contextmanager
def _restored(name: str, modules: Sequence[nn.Module], few: Tensor) -> Iterator[None]:
    saved = [(buffer, buffer.clone()) for buffer in _buffers(modules)]
    # Not a Sequential of them: it would register them, and they are many levels deep already.
    try:
        with untouched(nn.ModuleList(modules), ((few,), {}), few.device) as containers:
            found = [container.copy() for container in containers]
            yield
            for container, items in zip(containers, found, strict=True):
                _refuse_changed(name, container, items)
    finally:
        for buffer, before in saved:
            # Graphs of the user's that saved it do not notice.
            buffer.data.copy_(before)


def _refuse_changed(name: str, container: Any, was: Any) -> None:
    """Each slice would change it again, and whoever reads it would have that of the last one."""
    if isinstance(was, dict):
        keys, missing = dict.fromkeys((*was, *container)), object()
        pairs = ((it, container.get(it, missing), was.get(it, missing)) for it in keys)
        changed = [f"{it!r}" for it, now, before in pairs if not _same(now, before)]
    elif isinstance(was, set):
        changed = [] if container == was else ["an item of a set"]
    else:
        same = len(container) == len(was) and all(map(_same, container, was))
        changed = [] if same else ["an item of a list"]
    if changed:
        raise SectionError(
            f"{name} cannot run in slices: its forward changes {changed[0]} among the attributes "
            "of a module, which would be that of the last slice"
        )


def _same(one: object, other: object) -> bool:
    plain = (bool, int, float, str)
    return one is other or (type(one) is type(other) in plain and one == other)


def _buffers(modules: Iterable[nn.Module]) -> list[Tensor]:
    return [
        buffer for module in modules for buffer in module._buffers.values() if buffer is not None
    ]


def _seed(result: Tensor) -> Tensor:
    """A gradient that treats no two samples alike and draws from nobody's generator."""
    count = result.numel()
    ramp = torch.arange(count, dtype=torch.float64).mul_(0.7).sin_().add_(0.1)
    return ramp.view(result.shape).to(result)


def _tensor(result: object) -> Tensor:
    assert isinstance(result, Tensor)
    return result


def _difference(whole: list[Tensor | None], cut: list[Tensor | None]) -> float:
    """Largest difference of any tensor beside its own largest number; NaN and infinity stay."""
    pairs = []
    for one, other in zip(whole, cut, strict=True):
        if one is None or other is None or one.shape != other.shape:
            if one is not other:
                return float("inf")
        elif one.numel():
            gap = (one.double() - other.double()).abs().max().item()
            pairs.append((gap, one.double().abs().max().item()))
    least = _NOTHING * max((largest for _, largest in pairs), default=0.0)
    # Beside nothing, any difference is one.
    found = [gap / (max(largest, least) or gap) if gap else 0.0 for gap, largest in pairs]
    return next((it for it in found if it != it), max(found, default=0.0))


def _tolerance(results: list[list[Tensor | None]], few: Tensor) -> float:
    tensors = [few, *(tensor for group in results[:2] for tensor in group if tensor is not None)]
    found = max(TOLERANCES.get(tensor.dtype, 0.0) for tensor in tensors)
    if torch.is_autocast_enabled(few.device.type):
        found = max(found, TOLERANCES[torch.get_autocast_dtype(few.device.type)])
    tf32 = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    return max(found, _TF32) if few.is_cuda and tf32 and few.dtype is torch.float32 else found
