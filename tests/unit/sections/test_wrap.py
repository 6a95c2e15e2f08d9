from __future__ import annotations

import copy
import inspect
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from belady.errors import SectionError
from belady.ir.plan import Section
from belady.sections.wrap import wrap
from tests.support.training import footprint
from tests.unit.sections.comparing import (
    TOLERANCES,
    assert_alike,
    assert_same_in_sections,
    children,
    run,
    twins,
)

SLICES_SEEN: list[int] = []


class Seeing(nn.Module):
    """Says how many samples it is given."""

    def forward(self, x: Tensor) -> Tensor:
        SLICES_SEEN.append(len(x))
        return x * 2


class Calling(nn.Module):
    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def block() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 5),
    )


def images(samples: int = 7) -> Tensor:
    return torch.randn(samples, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def slices_of(model: nn.Module, x: Tensor) -> list[int]:
    SLICES_SEEN.clear()
    model(x)
    return list(SLICES_SEEN)


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    "sections",
    [
        (children(range(5), 3),),
        (children(range(7), 7),),
        (children([0], 2), children(range(2, 5), 4)),
        (Section(("",), 3),),
    ],
    ids=str,
)
def test_results_are_those_of_the_whole_batch(
    sections: tuple[Section, ...], dtype: torch.dtype, needs_gradient: bool
) -> None:
    x = images().requires_grad_(needs_gradient)
    assert_same_in_sections(block(), x, *sections, dtype=dtype)


def test_slices_are_as_equal_as_can_be() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Seeing())
    undo = wrap(model, [children(range(2), 3)])
    assert slices_of(model, torch.ones(8, 2)) == [3, 3, 2]
    undo()
    assert slices_of(model, torch.ones(8, 2)) == [8]


def test_a_smaller_batch_runs_sample_by_sample() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Seeing())
    wrap(model, [children(range(2), 64)])
    assert slices_of(model, torch.ones(3, 2)) == [1, 1, 1]
    assert_same_in_sections(block(), images()[:3], children(range(5), 64))


def test_what_needs_no_slices_runs_whole() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Seeing())
    wrap(model, [children(range(2), 3)])
    assert slices_of(model, torch.ones(1, 2)) == [1]
    with torch.no_grad():
        assert slices_of(model, torch.ones(8, 2)) == [8]
    model.requires_grad_(False)
    assert slices_of(model, torch.ones(8, 2)) == [8]
    assert slices_of(model, torch.ones(8, 2, requires_grad=True)) == [3, 3, 2]


def test_nothing_shows() -> None:
    model = block()
    modules = list(model.modules())
    before = (str(model), list(model.state_dict()), list(model.named_modules()), footprint(modules))
    parameters = list(model.named_parameters())
    undo = wrap(model, [children(range(5), 2), children([6], 2)])
    model(images()).sum().backward()
    for module in modules:
        assert inspect.signature(module.forward) == inspect.signature(
            type(module).forward.__get__(1)
        )
    assert before == (
        str(model), list(model.state_dict()), list(model.named_modules()), footprint(modules)
    )  # fmt: skip
    assert all(a is b for (_, a), (_, b) in zip(parameters, model.named_parameters(), strict=True))
    undo()
    assert all("forward" not in vars(module) for module in modules)
    undo()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_its_own_and_runs_whole(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Seeing())
    wrap(model, [children(range(2), 2)])
    twin = copied(model)
    with torch.no_grad():
        twin[0].weight.fill_(1)
        twin[0].bias.fill_(1)
    assert slices_of(twin, torch.ones(4, 2)) == [4]
    assert twin(torch.ones(4, 2)).tolist() == [[6, 6]] * 4
    assert slices_of(model, torch.ones(4, 2)) == [2, 2]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_can_be_cut_in_turn(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Seeing(), nn.Sequential(Seeing(), Seeing()))
    wrap(model, [children(range(2), 2), Section(("2",), 4)])
    twin = copied(model)
    undo = wrap(twin, [children(range(2), 4), Section(("2",), 2)])
    assert slices_of(twin, torch.ones(4, 2)) == [1] * 4 + [2] * 4
    undo()
    assert slices_of(twin, torch.ones(4, 2)) == [4] * 3


def test_parameters_are_seen_once_by_their_hooks() -> None:
    model, twin, _ = twins(block(), children(range(7), 3))
    seen: list[str] = []
    for name, parameter in twin.named_parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    x = images().double()
    expected, actual = run(model, x), run(twin, x)
    assert sorted(seen) == sorted(name for name, _ in twin.named_parameters())
    doubled = [None, *(2 * gradient for gradient in expected[1][1:])]
    assert_alike([doubled], [actual[1]], torch.float64)


def test_frozen_and_tied_parameters() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)), nn.Tanh())
    model[0].requires_grad_(False)
    model[3].bias.requires_grad_(False)
    model[2].weight = model[1].weight
    for x in (torch.randn(6, 4), torch.randn(6, 4, requires_grad=True)):
        assert_same_in_sections(model, x, children(range(5), 4))
        assert_same_in_sections(model, x, children(range(2), 2), children(range(2, 5), 3))


def test_channels_last_and_other_layouts_stay() -> None:
    x = images().to(memory_format=torch.channels_last).requires_grad_()
    assert_same_in_sections(block().to(memory_format=torch.channels_last), x, children(range(5), 3))
    assert_same_in_sections(block(), images().transpose(2, 3), children(range(5), 3))
    transposing = nn.Sequential(nn.Linear(3, 3), Calling(lambda _, x: x.mT))
    assert_same_in_sections(transposing, torch.randn(4, 2, 3), children(range(2), 2))


def test_results_that_alias_the_input_or_do_not_depend_on_it() -> None:
    for last in (nn.Identity(), nn.Flatten(), Calling(lambda _, x: x.detach())):
        model = nn.Sequential(nn.Linear(3, 3), last, nn.Linear(3, 3))
        assert_same_in_sections(model, torch.randn(5, 3), children([1], 2), children([2], 3))


def test_backward_habits() -> None:
    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    x = images().requires_grad_()
    assert_same_in_sections(block(), x, children(range(5), 3), backward=twice)
    model = block()
    wrap(model, [children(range(5), 3)])
    model(x)  # a graph that nobody uses
    loss = model(x).sum()
    torch.autograd.grad(loss, model[0].weight, retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_a_weight_changed_before_backward_is_noticed() -> None:
    for section in (children(range(5), 2), children([4], 2)):
        model = block()
        model[4] = nn.Sequential(nn.BatchNorm2d(4), nn.MaxPool2d(2))
        wrap(model, [section])
        loss = model(images().requires_grad_()).sum()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_gradient_of_a_gradient_is_refused() -> None:
    model = block()
    wrap(model, [children(range(5), 3)])
    with pytest.raises(SectionError, match="create_graph=True"):
        torch.autograd.grad(model(images()).sum(), model[0].weight, create_graph=True)


def test_autocast() -> None:
    def inside(_: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x.mT

    model, twin, _ = twins(block(), children(range(7), 3), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert_alike(run(model, images()), run(twin, images()), torch.bfloat16)
    mixed = nn.Sequential(nn.Linear(3, 3), Calling(inside))
    model, twin, _ = twins(mixed, children(range(2), 2), dtype=torch.float32)
    x = torch.randn(4, 2, 3)
    assert_alike(run(model, x), run(twin, x), torch.bfloat16)


def test_a_user_who_checkpoints_inside() -> None:
    inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    model = nn.Sequential(
        nn.Linear(3, 3),
        Calling(lambda self, x: checkpoint(self.inner, x, use_reentrant=False), inner=inner),
    )
    assert_same_in_sections(model, torch.randn(5, 3), children(range(2), 2))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_user_who_checkpoints_around(reentrant: bool) -> None:
    model, twin, _ = twins(block(), children(range(5), 3))
    x = images().double().requires_grad_()
    found = []
    for module in (model, twin):
        checkpoint(module, x, use_reentrant=reentrant).square().mean().backward()
        found.append([x.grad, *(parameter.grad for parameter in module.parameters())])
        x.grad = None
    assert_alike([found[0]], [found[1]], torch.float64)


def test_functional_transforms_are_an_error() -> None:
    model = block()
    wrap(model, [children(range(5), 3)])
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda y: model(y).sum())(images())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_interrupted_call_leaves_the_module_usable(error: type[BaseException]) -> None:
    def fail(self: Any, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 2:
            raise error("on purpose")
        return x.tanh()

    model = nn.Sequential(nn.Linear(3, 3), Calling(fail))
    parameters = list(model.parameters())
    wrap(model, [children(range(2), 4)])
    x = torch.randn(8, 3)
    with pytest.raises(error):
        model(x)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in parameters)


def test_a_failing_backward_passes_its_error_on() -> None:
    def failing(_: nn.Module, x: Tensor) -> Tensor:
        def fail(gradient: Tensor) -> None:
            raise ValueError("on purpose")

        x = x.tanh()
        if x.requires_grad:
            x.register_hook(fail)
        return x

    model = nn.Sequential(nn.Linear(3, 3), Calling(failing))
    wrap(model, [children(range(2), 4)])
    loss = model(torch.randn(8, 3)).sum()
    with pytest.raises(ValueError, match="on purpose"):
        loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_threads_take_turns() -> None:
    model, twin, _ = twins(block(), children(range(5), 4))
    x = images().double()
    (4 * model(x).square().mean()).backward()
    losses: list[Tensor] = []
    workers = [
        threading.Thread(target=lambda: losses.append(twin(x).square().mean())) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    torch.stack(losses).sum().backward()
    assert_alike(
        [[p.grad for p in model.parameters()]], [[p.grad for p in twin.parameters()]], torch.float64
    )
    assert all(isinstance(parameter, nn.Parameter) for parameter in twin.parameters())


def test_runs_on_tensors_without_bytes() -> None:
    model = block()
    wrap(model, [children(range(5), 3)])
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        assert model(fake.from_tensor(images())).shape == (7, 5)


def test_graphs_outlive_the_sections() -> None:
    model, twin, undo = twins(block(), children(range(5), 3))
    x = images().double()
    loss = twin(x).square().mean()
    undo()
    loss.backward()
    model(x).square().mean().backward()
    assert_alike(
        [[p.grad for p in model.parameters()]], [[p.grad for p in twin.parameters()]], torch.float64
    )


def outside() -> nn.Module:
    weight = torch.randn(3, requires_grad=True)
    return nn.Sequential(nn.Linear(3, 3), Calling(lambda _, x: x * weight))


REFUSED_BY_A_CALL: list[tuple[nn.Module, str]] = [
    (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3)), "ReLU writes the input of the section"),
    (nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True)), "ReLU writes the input of the section"),
    (nn.Sequential(nn.Linear(3, 3), Calling(lambda _, x: (x, x))), "gives tuple, not one tensor"),
    (nn.Sequential(nn.Linear(3, 3), Calling(lambda _, x: x.sum(0))), "is not the batch"),
    (nn.Sequential(nn.Linear(3, 3), Calling(lambda _, x: x.view(-1))), "is not the batch"),
    (
        nn.Sequential(nn.Linear(3, 3), Calling(lambda _, x: x @ x.T)),
        "slices of .* a sample",
    ),
    (outside(), "is no parameter of its modules"),
]


@pytest.mark.parametrize(("model", "reason"), REFUSED_BY_A_CALL)
def test_what_only_a_call_shows_is_refused(model: nn.Module, reason: str) -> None:
    undo = wrap(model, [children(range(2), 2)])
    x = torch.randn(5, 3, requires_grad=True)
    with pytest.raises(SectionError, match=reason):
        model(x)
    undo()
    model(x.clone())


def test_other_arguments_than_one_tensor_are_refused() -> None:
    model = Calling(lambda self, *args: self.inner(args[0]), inner=nn.Linear(3, 3))
    wrap(model, [Section(("",), 2)])
    x = torch.randn(4, 3)
    for args in ((x, x), ([x],), (torch.ones(()),)):
        with pytest.raises(SectionError, match="tensors with a batch dimension"):
            model(*args)


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    model[1].register_forward_hook(lambda *_: None)
    return model


def patched() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    model[1].forward = torch.relu
    return model


BOTH = children(range(2), 2)
REFUSED: list[tuple[nn.Module, tuple[Section, ...], str]] = [
    (hooked(), (BOTH,), "Tanh has hooks"),
    (patched(), (BOTH,), "Tanh has another forward"),
    (nn.Sequential(nn.Linear(3, 3), nn.Dropout2d(0.5)), (BOTH,), "Dropout2d draws random numbers"),
    (nn.Sequential(nn.Linear(3, 3), nn.RReLU()), (BOTH,), "RReLU draws random numbers"),
    (nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3)), (BOTH,), "from other processes"),
    (block(), (Section(("0", "2"), 2),), "not consecutive modules of one parent"),
    (block(), (Section(("0",), 1),), "at least two slices"),
    (block(), (Section((), 2),), "at least two slices"),
    (block(), (Section(("nowhere",), 2),), "no module 'nowhere'"),
    (block(), (children(range(3), 2), children([2], 2)), "sections overlap"),
    (block(), (Section(("",), 2), children([2], 2)), "sections overlap"),
    (nn.ModuleList([nn.Linear(3, 3), nn.Tanh()]), (BOTH,), "only a torch.nn.Sequential"),
]


@pytest.mark.parametrize(("model", "sections", "reason"), REFUSED)
def test_what_cannot_be_cut_is_refused(
    model: nn.Module, sections: tuple[Section, ...], reason: str
) -> None:
    with pytest.raises(SectionError, match=reason):
        wrap(model, sections)
    assert "forward" not in vars(model)


def test_a_second_wrap_is_refused_until_the_first_is_undone() -> None:
    model = block()
    undo = wrap(model, [children(range(5), 2)])
    with pytest.raises(SectionError, match="not undone"):
        wrap(model, [children(range(2), 2)])
    undo()
    wrap(model, [children(range(2), 2)])()


def test_hooks_on_the_run_itself_see_the_batch() -> None:
    model = nn.Sequential(block()[:2], nn.Flatten(), nn.Linear(256, 2))
    seen: list[int] = []
    model[0].register_forward_hook(lambda _module, _args, result: seen.append(len(result)))
    wrap(model, [children([0], 3)])
    model(images())
    assert seen == [7]
