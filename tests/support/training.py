"""Training runs that can be compared bit for bit, and ways in which people write an iteration."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
import torch.nn.modules.module as module_hooks
import torch.optim.optimizer as optimizer_hooks
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import keystr, tree_flatten_with_path

import belady
from belady.errors import InfeasibleBudgetError
from tests.support.models import Task, comparable

SAMPLES = 8

T = TypeVar("T")

# One iteration, given its number; gives what is to be compared besides the state.
Step = Callable[["Training", int], list[Tensor]]


class Training:
    """Models of a task, their optimizers, and what came of them so far."""

    def __init__(self, task: Task, device: str = "cpu", seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.task = task
        self.device = device
        self.models: list[nn.Module] = [
            comparable(model, device).to(device) for model in task.models()
        ]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
            for model in self.models
        ]
        self.losses: list[Tensor] = []

    @property
    def model(self) -> nn.Module:
        return self.models[0]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.optimizers[0]

    def batch(self, index: int, size: int = SAMPLES) -> tuple[Tensor, Tensor]:
        """Batch ``index``: always the same."""
        x, y = self.task.batch(size, torch.Generator().manual_seed(1000 + index))
        return x.to(self.device), y.to(self.device)

    def loss(self, index: int, size: int = SAMPLES) -> Tensor:
        x, y = self.batch(index, size)
        return self.task.loss(self.model(x), y)

    def run(self, step: Step, iterations: Iterable[int]) -> Training:
        for index in iterations:
            self.losses += [loss.detach().clone() for loss in step(self, index)]
        return self

    def outcome(self) -> dict[str, Tensor]:
        """Everything that must come out equal, by name."""
        found: dict[str, Any] = {"loss": self.losses, "random": torch.get_rng_state()}
        if self.device == "cuda":
            found["cuda random"] = torch.cuda.get_rng_state()
        for number, model in enumerate(self.models):
            found[f"parameter {number}"] = dict(model.named_parameters())
            found[f"buffer {number}"] = dict(model.named_buffers())
            found[f"gradient {number}"] = {n: p.grad for n, p in model.named_parameters()}
        for number, optimizer in enumerate(self.optimizers):
            found[f"optimizer {number}"] = optimizer.state_dict()["state"]
        leaves, _ = tree_flatten_with_path(found)
        return {
            keystr(path): leaf.detach().clone() for path, leaf in leaves if isinstance(leaf, Tensor)
        }


@contextmanager
def repeatable() -> Iterator[None]:
    """Run the kernels for which parity is promised, on one thread: tensors here are tiny."""
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)


def raw(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as bytes, so that NaN equals itself and 0 is not −0."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    dense = torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)
    return dense.view(-1).view(torch.uint8)


def differences(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that are not the same in every bit."""
    names = sorted(expected.keys() ^ actual.keys())
    for name in expected.keys() & actual.keys():
        a, b = expected[name], actual[name]
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(raw(a), raw(b)):
            names.append(name)
    return names


CUDA_SLACK_BYTES = 512 * 2**20


def at_tight_budget(train: Callable[[int], T], device: str = "cpu") -> T:
    """What ``train`` gives at the smallest budget that trains, found by doing as each refusal says.

    The first refusal knows the root only; a later one has seen loss and optimizer at work too.
    On a GPU the cap holds for all that the process has, library workspaces and the leavings of
    other tests included, so these small models get room beside it.
    """
    budget, named = 1, 0
    for _ in range(5):
        try:
            result = train(budget)
        except InfeasibleBudgetError as error:
            # Its traceback would keep the tensors of this attempt.
            named = error.with_traceback(None).smallest_bytes
        except belady.OutOfMemoryError:
            if device != "cuda" or budget > 1:
                raise
            # Some calls cannot be traced without running them; then the cap is the judge.
            named = CUDA_SLACK_BYTES
        else:
            assert budget > 1
            return result
        if named <= budget:
            break
        budget = named + CUDA_SLACK_BYTES * (device == "cuda")
    raise AssertionError(f"{budget} bytes, the last figure named, were refused as well")


# -- ways to write an iteration ------------------------------------------------------------------


def plain(training: Training, index: int) -> list[Tensor]:
    loss = training.loss(index)
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return [loss]


def smallest(of: Task, step: Step = plain) -> InfeasibleBudgetError:
    """What is refused where everything moves that may."""
    training = Training(of)
    vm = belady.virtualize(training.models, 1 << 10, policy="floor")
    with vm, pytest.raises(InfeasibleBudgetError) as caught:
        step(training, 0)
    return caught.value


def adversarial(training: Training, index: int) -> list[Tensor]:
    """Two roots, three passes, two steps: the critic's, then the generator's."""
    generator, critic = training.models
    noise, real = training.batch(index)
    fake = generator(noise)
    verdict = torch.cat([critic(real), critic(fake.detach())])
    truth = torch.cat([torch.ones_like(verdict[:SAMPLES]), torch.zeros_like(verdict[SAMPLES:])])
    critic_loss = F.binary_cross_entropy_with_logits(verdict, truth)
    critic_loss.backward()
    training.optimizers[1].step()
    training.optimizers[1].zero_grad()
    generator_loss = F.softplus(-critic(fake)).mean()
    generator_loss.backward()
    training.optimizers[0].step()
    for optimizer in training.optimizers:
        optimizer.zero_grad()
    return [critic_loss, generator_loss]


def autocast(training: Training, index: int) -> list[Tensor]:
    with torch.autocast(training.device, torch.bfloat16):
        loss = training.loss(index)
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return [loss]


def accumulating(training: Training, index: int) -> list[Tensor]:
    losses = []
    for micro in range(2):
        loss = training.loss(2 * index + micro) / 2
        loss.backward()
        losses.append(loss)
    training.optimizer.step()
    training.optimizer.zero_grad()
    return losses


def zeroing_first(training: Training, index: int) -> list[Tensor]:
    training.optimizer.zero_grad(set_to_none=False)
    losses = [training.loss(2 * index), training.loss(2 * index + 1)]
    for loss in losses:
        loss.backward()
    training.optimizer.step()
    return losses


def clipping(training: Training, index: int) -> list[Tensor]:
    loss = training.loss(index)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
    training.optimizer.step()
    training.optimizer.zero_grad()
    return [loss, norm]


def evaluating(training: Training, index: int) -> list[Tensor]:
    """Look at the validation loss between forward and backward, and after the step."""
    loss = training.loss(index)
    seen = [_evaluate(training)]
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return [loss, *seen, _evaluate(training)]


def _evaluate(training: Training) -> Tensor:
    training.model.eval()
    try:
        with torch.no_grad():
            return training.loss(99)
    finally:
        training.model.train()


def short_at_the_end(training: Training, index: int) -> list[Tensor]:
    loss = training.loss(index, SAMPLES if index % 4 != 3 else 3)
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return [loss]


def twice_backward(training: Training, index: int) -> list[Tensor]:
    loss = training.loss(index)
    loss.backward(retain_graph=True)
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return [loss]


def abandoning(training: Training, index: int) -> list[Tensor]:
    """Run a forward whose graph is thrown away, then one that counts."""
    training.loss(index + 50)
    return plain(training, index)


def by_hand(training: Training, index: int) -> list[Tensor]:
    """Stochastic gradient descent without an optimizer."""
    loss = training.loss(index)
    parameters = [p for p in training.model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p -= 0.05 * gradient
    return [loss]


def closing_over(training: Training, index: int) -> list[Tensor]:
    """Give the optimizer a closure, as L-BFGS needs it."""

    def closure() -> Tensor:
        training.optimizer.zero_grad()
        loss = training.loss(index)
        loss.backward()
        return loss

    return [training.optimizer.step(closure)]


class Interruption:
    """A step in which the forward of one submodule raises now and then, and is tried again."""

    def __init__(self, error: type[BaseException], at: Iterable[int], layer: int = -1) -> None:
        self.error = error
        self.at = frozenset(at)
        self.layer = layer

    def __call__(self, training: Training, index: int) -> list[Tensor]:
        if index in self.at:
            with raising(training.model, self.error, self.layer):
                try:
                    training.loss(index)
                except self.error:
                    pass
                else:
                    raise AssertionError("the forward should not have gone through")
        return plain(training, index)


@contextmanager
def raising(model: nn.Module, error: type[BaseException], layer: int) -> Iterator[None]:
    """Let a submodule that has parameters of its own raise when it is called."""
    owners = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]

    def fail(*_: Any) -> None:
        raise error("on purpose")

    handle = owners[layer].register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


# -- what must be as it was found ----------------------------------------------------------------


def footprint(modules: Iterable[nn.Module]) -> dict[str, Any]:
    """Everything that hooks into torch or the process, by name, as counts."""
    hooks = {
        f"{name} of {type(owner).__name__}": len(getattr(owner, name))
        for owner in modules
        for name in vars(owner)
        if name.endswith("_hooks") or name.endswith("_hooks_with_kwargs")
    }
    return hooks | {
        "global module hooks": len(module_hooks._global_forward_hooks)
        + len(module_hooks._global_forward_pre_hooks)
        + len(module_hooks._global_forward_hooks_always_called),
        "global optimizer hooks": len(optimizer_hooks._global_optimizer_pre_hooks)
        + len(optimizer_hooks._global_optimizer_post_hooks),
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "function modes": len(_get_current_function_mode_stack()),
        "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "backward on its own threads": torch.autograd.is_multithreading_enabled(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "files": sorted(_open_files()),
    }


def _open_files() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own descriptor
            yield os.readlink(f"/proc/self/fd/{name}")
