"""Of several choices of slices the one that the device runs fastest, as trials of it show."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

import belady
from belady.ir.hardware import Allocator, HardwareProfile
from belady.ir.plan import Budget, Section
from belady.measure.stages import Policy
from belady.planners.least import Least
from belady.planners.places import Sections
from belady.planners.sectioning import Sectioning
from belady.sections import choice, race, searching, timing
from belady.sections.candidate import Candidate, chains
from belady.sections.cutting import Cutting
from belady.sections.race import Race
from belady.sections.searching import Searching
from belady.sections.timing import Convolution, Limit, Timing
from belady.sections.workspaces import is_channels_last
from tests.unit.planners.nets import gpu

CPU = torch.device("cpu")
KEY = (0,)
SAMPLES = 32
PLENTY = 1 << 40
LEAST = Least(gpu(), Budget(PLENTY))


@pytest.fixture(autouse=True)
def _any_algorithm() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(before)


def model() -> nn.Sequential:
    first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
    return nn.Sequential(first, nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))


def called(net: nn.Module) -> Candidate:
    call = ((torch.rand(SAMPLES, 3, 32, 32),), {})
    found = Candidate.of(net, call, CPU)
    assert found is not None
    return found


class Trials:
    """Stands for the device: how long convolutions of so many samples take, and what was asked."""

    def __init__(self, seconds: dict[int, float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[int, int]] = []
        self._seconds = seconds
        monkeypatch.setattr(Timing, "_tried", lambda _, it: self(it))

    def __call__(self, it: Convolution) -> float:
        samples = it.shape[0]
        self.asked.append((samples, it.free_bytes))
        return samples * self._seconds.get(samples, 1.0)


def raced(
    net: nn.Module,
    known: dict[Hashable, float] | None = None,
    may: Callable[[Section], bool] = lambda _: True,
    *,
    limit: Limit = timing.allowance,
    last: bool = False,
    whole: bool = False,
) -> Race:
    call = called(net)
    search = Sectioning(call.trace, LEAST, chains(net), may)
    clock = Timing(CPU, last, {} if known is None else known, limit)
    return Race(call, search, clock, gpu(), whole)


def cut(slices: int, modules: Sequence[str] = ("0", "1", "2", "3")) -> Sections:
    return (Section(tuple(modules), slices),)


def test_the_fastest_choice_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    Trials({4: 0.5, 8: 0.3, 16: 0.9}, monkeypatch)
    choices = [cut(8), cut(4), cut(2)]
    assert raced(model()).fastest(choices, PLENTY, []) == cut(4)


def test_what_is_near_the_fastest_is_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    Trials({2: 0.1, 4: 0.5, 8: 0.7, 16: 0.9}, monkeypatch)
    assert raced(model()).fastest([cut(2), cut(4)], PLENTY, [PLENTY]) == cut(16)


def test_nothing_is_timed_or_looked_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "workspace_share", lambda *_: 3.15)
    Trials({2: 0.1, 4: 0.5, 8: 0.7, 16: 0.9}, monkeypatch)
    timed: list[Sections] = []
    limits: list[int] = []
    seconds, within = Race._seconds, Sectioning.within

    def noted(self: Race, sections: Sections, room: int) -> float:
        timed.append(sections)
        return seconds(self, sections, room)

    def also_noted(self: Sectioning, nbytes: int) -> Sections | None:
        limits.append(nbytes)
        return within(self, nbytes)

    monkeypatch.setattr(Race, "_seconds", noted)
    monkeypatch.setattr(Sectioning, "within", also_noted)
    net, call = model(), ((torch.rand(SAMPLES, 3, 32, 32),), {})
    search = Sectioning(called(net).trace, LEAST, chains(net), lambda _: True)
    machine = replace(gpu(), allocator=Allocator(1, 0.2, 0))
    budget = Budget(int(1.1 * search._needed(())[0]))
    assert Cutting(Policy("auto", budget), machine, CPU).cut(KEY, net, call)
    assert len(timed) == len(set(timed)) > 2
    assert len(limits) == len(set(limits)) > 1


def test_what_is_near_has_to_fit_where_the_choice_does(monkeypatch: pytest.MonkeyPatch) -> None:
    Trials({8: 0.5, 16: 0.2}, monkeypatch)
    running = raced(model())
    needed, _ = running.search._needed(cut(4))
    # Fewer slices need more.
    assert running.fastest([cut(4)], PLENTY, [needed, PLENTY]) == cut(4)
    assert running.fastest([cut(4)], PLENTY, [needed - 1, PLENTY]) == cut(2)


def test_what_may_not_be_is_not_taken_and_only_what_is_faster_is_asked_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Trials({2: 0.1, 4: 0.5, 8: 0.4}, monkeypatch)
    asked: list[Section] = []

    def may(section: Section) -> bool:
        asked.append(section)
        return section.modules == ("0", "1", "2", "3")

    fast, slow = cut(16, ("0", "1")), cut(2, ("1", "2"))
    running = raced(model(), may=may)
    assert running.fastest([cut(4), fast, slow], PLENTY, []) == cut(4)
    assert [it.modules for it in asked] == [cut(4)[0].modules, fast[0].modules]


def test_what_is_near_is_one_change_away() -> None:
    chains_ = [("0", "1", "2", "3"), ("0.0", "0.1")]
    first, last = Section(("0", "1"), 4), Section(("2",), 8)
    near = list(race._near((first, last), chains_))
    assert (Section(("0", "1"), 8), last) in near
    assert (first, Section(("2",), 16)) in near
    assert (Section(("0", "1"), 2), last) in near
    assert (Section(("0",), 4), Section(("1",), 2), last) in near
    assert (first,) in near
    # As one, in slices as many as either has; and with the module behind.
    assert (Section(("0", "1", "2"), 4),) in near
    assert (Section(("0", "1", "2"), 8),) in near
    assert (first, Section(("2", "3"), 8)) in near
    assert all(it.slices > 1 for sections in near for it in sections)
    names = [[name for it in sections for name in it.modules] for sections in near]
    assert all(len(set(it)) == len(it) for it in names)


def test_slices_of_samples_and_of_tokens_stay_apart() -> None:
    sections = Section(("0",), 4), Section(("1",), 4, 1)
    near = list(race._near(sections, [("0", "1", "2")]))
    assert not any({"0", "1"} <= set(it.modules) for found in near for it in found)
    assert (sections[0], Section(("1", "2"), 4, 1)) in near


def test_what_fits_is_asked_no_longer_than_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    Trials({4: 0.5, 8: 0.2}, monkeypatch)
    running, asked = raced(model()), []
    fits = Sectioning.fits

    def noted(self: Sectioning, sections: Sections, nbytes: int) -> bool:
        asked.append(sections)
        return fits(self, sections, nbytes)

    monkeypatch.setattr(Sectioning, "fits", noted)
    monkeypatch.setattr(race, "_SECONDS", -1.0)
    running.fastest([cut(8)], PLENTY, [PLENTY])
    # The choice itself, and the first that is near it.
    assert len(asked) == 2


def test_only_the_first_is_tried_once_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials({4: 0.5, 8: 0.2}, monkeypatch)
    monkeypatch.setattr(race, "_SECONDS", -1.0)
    assert raced(model()).fastest([cut(8), cut(4)], PLENTY, [PLENTY]) == cut(8)
    assert {samples for samples, _ in trials.asked} == {4}


def test_a_convolution_is_tried_once_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials({4: 0.1}, monkeypatch)
    known: dict[Hashable, float] = {}
    for _ in range(2):
        raced(model(), known).fastest([cut(8), cut(4)], PLENTY, [])
    # Two convolutions that differ, in slices of two sizes.
    assert sorted(samples for samples, _ in trials.asked) == [4, 4, 8, 8]
    # Less room is another kind.
    raced(model(), known).fastest([cut(8), cut(4)], PLENTY // 8, [])
    assert len(trials.asked) == 8


def test_a_trial_finds_as_much_room_as_the_floor_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials({}, monkeypatch)
    running = raced(model())
    room = 64 << 20
    running._seconds(cut(8), room)
    under, held = running.search.floor(cut(8))
    most = {
        name: max(n for n, op in zip(held, under.ops, strict=True) if op.module == name)
        for name in ("0.0", "1")
    }
    assert [free for _, free in trials.asked] == [room - most["0.0"], room - most["1"]]


def test_what_cannot_be_tried_is_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(_: Timing, it: Convolution) -> float:
        if it.shape[0] == 8:
            raise torch.OutOfMemoryError("no room")
        return 1.0

    monkeypatch.setattr(Timing, "_tried", scarce)
    assert raced(model()).fastest([cut(4), cut(8)], PLENTY, []) == cut(8)


@pytest.mark.parametrize("last", [False, True])
def test_a_trial_runs_the_real_convolution_and_leaves_nothing(
    last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    @contextmanager
    def limit(_: torch.device, nbytes: int) -> Iterator[None]:
        asked.append(nbytes)
        yield

    layouts: list[bool] = []
    threads: set[int] = set()
    masks: list[tuple[int, list[bool]]] = []
    forward, backward = timing._FORWARD, timing._BACKWARD

    def noted(x: torch.Tensor, *rest: Any) -> object:
        layouts.append(x.is_contiguous(memory_format=torch.channels_last))
        threads.add(threading.get_ident())
        assert x.shape[0] == 4
        return forward(x, *rest)

    def also_noted(gradient: torch.Tensor, x: torch.Tensor, *rest: Any) -> object:
        assert gradient.shape == (4, 8, 32, 32)
        threads.add(threading.get_ident())
        masks.append((x.shape[1], rest[-1]))
        return backward(gradient, x, *rest)

    net = model().to(memory_format=torch.channels_last if last else torch.contiguous_format)
    before = {name: it.clone() for name, it in net.state_dict().items()}
    running = raced(net, limit=limit, last=last)
    monkeypatch.setattr(timing, "_BACKWARD", also_noted)
    monkeypatch.setattr(timing, "_FORWARD", noted)
    state = torch.get_rng_state()
    assert 0.0 < running._seconds(cut(8), 1 << 30) < 1.0
    assert torch.equal(torch.get_rng_state(), state)
    assert layouts
    assert all(it == last for it in layouts)
    # Images need no gradient, and what comes out of another module does.
    assert {(3, (False, True, True)), (8, (True, True, True))} == {
        (channels, tuple(mask)) for channels, mask in masks
    }
    # Each kind on a thread of its own: what cuDNN chose in it is gone.
    assert threading.get_ident() not in threads
    assert all(it.grad is None for it in net.parameters())
    after = net.state_dict()
    assert all(torch.equal(after[name], it) for name, it in before.items())
    # What comes out, then gradients of what went in and of weights, beside what is free.
    images, maps = 4 * 4 * 3 * 1024, 4 * 4 * 8 * 1024
    own = [(images + maps, images + 4 * 8 * 27), (2 * maps, maps + 4 * 8 * 72)]
    slices = list(running._slices(cut(8), 1 << 30))
    wanted = [n + it.free_bytes for both, (_, it) in zip(own, slices, strict=True) for n in both]
    assert asked == wanted


@pytest.mark.parametrize(
    ("made", "args"),
    [
        (nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (8, 8)),
        (nn.Conv2d(3, 4, 3, padding="same", bias=False), (8, 8)),
        (nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), (8, 8)),
        (nn.Conv1d(3, 6, 5, groups=3, dilation=2), (32,)),
        (nn.Conv3d(3, 4, 3), (4, 8, 8)),
    ],
    ids=lambda it: type(it).__name__ if isinstance(it, nn.Module) else "",
)
def test_a_convolution_is_called_as_its_module_does(made: nn.Module, args: tuple[int, ...]) -> None:
    x = torch.rand(2, 3, *args)
    images, *rest = timing._called(made, x)
    assert torch.equal(timing._FORWARD(images, *rest), made(x))
    assert timing.can_be_tried(made)
    assert 0.0 < Timing(CPU, False, {})(Convolution(made, (2, 3, *args), x.dtype, True, 0, 0)) < 1.0


@pytest.mark.parametrize(("frozen", "seconds"), [(False, 2.0), (True, 1.0)])
def test_a_trial_counts_forward_and_what_there_is_of_backward(
    frozen: bool, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def median(_: Timing, run: Callable[[], object]) -> float:
        run()
        return 1.0

    monkeypatch.setattr(Timing, "_median", median)
    net = nn.Conv2d(3, 8, 3).requires_grad_(not frozen)
    tried = Convolution(net, (2, 3, 8, 8), torch.float32, False, 0, 0)
    assert Timing(CPU, False, {})(tried) == seconds


def kinds() -> Iterator[Convolution]:
    def of(net: nn.Module, samples: int = 2, free: int = 1 << 20) -> Convolution:
        return Convolution(net, (samples, 4, 8, 8), torch.float32, True, 0, free)

    plain = nn.Conv2d(4, 4, 3)
    yield of(plain)
    yield of(plain, samples=3)
    yield of(plain, free=1 << 22)
    yield of(plain)._replace(needs_gradient=False)
    yield of(plain)._replace(dtype=torch.float64)
    yield of(nn.Conv2d(4, 4, 3, groups=2))
    yield of(nn.Conv2d(4, 4, 3, padding=1))
    yield of(nn.Conv2d(4, 4, 3, bias=False))
    yield of(nn.Conv2d(4, 8, 3))
    yield of(nn.Conv2d(4, 4, 3).requires_grad_(False))
    yield of(nn.Conv2d(4, 4, 3).double())
    yield of(nn.ConvTranspose2d(4, 4, 3))


def test_what_takes_another_time_is_another_kind() -> None:
    found = [it.kind for it in kinds()]
    assert len(set(found)) == len(found)
    assert found == [it.kind for it in kinds()]


@pytest.mark.parametrize("setting", ["layout", "benchmark"])
def test_settings_make_another_kind_too(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trials, known = Trials({}, monkeypatch), dict[Hashable, float]()
    (first, *_) = kinds()
    for on in (False, True, False):
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", on and setting == "benchmark")
        Timing(CPU, on and setting == "layout", known)(first)
    assert len(trials.asked) == 2


def test_slices_of_two_sizes_are_two_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    Trials({}, monkeypatch)
    found = [(times, it.shape[0]) for times, it in raced(model())._slices(cut(24), PLENTY)]
    # 32 samples.
    assert found == [(8, 2), (16, 1), (8, 2), (16, 1)]


def test_what_ops_read_and_make_counts_beside_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    Trials({}, monkeypatch)
    monkeypatch.setattr(HardwareProfile, "memory_seconds", lambda _, nbytes: nbytes / 1e6)
    running = raced(model())
    kernels = 2 * SAMPLES
    found = running._seconds(cut(8), PLENTY)
    assert found == pytest.approx(kernels + running.search.work(cut(8)) / 1e6)


class Twice(nn.Module):
    """Calls a convolution on maps of two sizes, and another one on no sample at all."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.none = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.shared(nn.functional.avg_pool2d(self.shared(x), 4))
        return made + self.none(x[:0]).sum()


def test_each_call_of_a_module_counts_with_its_own_size() -> None:
    found = [(times, it.shape) for times, it in raced(Twice())._slices((), PLENTY)]
    assert found == [(1, (SAMPLES, 3, 32, 32)), (1, (SAMPLES, 3, 8, 8))]


@pytest.mark.parametrize("part", [0.9, 1.02])
def test_no_room_is_taken_that_was_seen_to_be_missing(
    part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "workspace_share", lambda *_: 3.15)
    # What runs whole is fastest by far.
    Trials({SAMPLES: 0.01}, monkeypatch)
    net, call = model(), ((torch.rand(SAMPLES, 3, 32, 32),), {})
    search = Sectioning(called(net).trace, LEAST, chains(net), lambda _: True)
    budget = int(part * search._needed(())[0])
    for over in (0.05, 0.2):
        parts = Cutting(Policy("auto", Budget(budget)), gpu(), CPU)
        parts.begin(KEY, net)
        parts.leave(int(over * budget))
        assert parts.cut(KEY, net, call)
        sections = parts._known[net][KEY].sections
        assert search._needed(sections)[0] <= 0.98 / (1 + over) * budget
        parts.close()


@pytest.mark.parametrize("whole", [False, True])
def test_only_what_may_runs_whole(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    Trials({SAMPLES: 0.01}, monkeypatch)
    found = raced(model(), whole=whole).fastest([cut(2)], PLENTY, [PLENTY])
    assert (not found) == whole


def test_who_may_run_whole_is_a_call_that_fits_but_for_workspaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(searching, "workspace_share", lambda *_: 3.15)
    Trials({}, monkeypatch)
    asked: list[bool] = []
    race_of_call = Searching.race

    def noted(self: Searching, call: Candidate, *, whole: bool) -> Race | None:
        asked.append(whole)
        return race_of_call(self, call, whole=whole)

    monkeypatch.setattr(Searching, "race", noted)
    call = ((torch.rand(SAMPLES, 3, 32, 32),), {})
    parts = Cutting(Policy("auto", Budget(PLENTY)), gpu(), CPU)
    parts.cut(KEY, model(), call)
    parts.cut_for_workspaces(KEY, model(), call)
    assert asked == [False, True]


def test_a_call_that_was_not_made_is_not_known() -> None:
    net = model()
    call = called(net)
    assert call.given(net[1], 0) is not None
    assert call.given(net[1], 1) is None


def test_a_weight_that_a_hook_makes_is_not_tried() -> None:
    pruned = nn.utils.prune.random_unstructured(nn.Conv2d(3, 4, 3), "weight", amount=1)
    assert type(pruned) is nn.Conv2d
    assert not timing.can_be_tried(pruned)
    assert not timing.can_be_tried(None)
    assert timing.can_be_tried(nn.Conv2d(3, 4, 3))


def race_of(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Race | None:
    monkeypatch.setattr(searching, "workspace_share", lambda *_: 3.15)
    return Searching(LEAST, CPU).race(called(net), whole=False)


def test_a_weight_that_is_made_anew_is_not_even_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    net[1] = nn.utils.parametrizations.spectral_norm(net[1])
    before = {name: it.clone() for name, it in net.named_buffers()}
    call = called(net)
    after_trace = {name: it.clone() for name, it in net.named_buffers()}
    assert race_of(net, monkeypatch) is None
    assert not is_channels_last(net, call.call)
    assert before
    assert all(torch.equal(it, after_trace[name]) for name, it in net.named_buffers())


def test_what_is_to_repeat_is_not_raced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert race_of(model(), monkeypatch) is not None
    torch.use_deterministic_algorithms(True)
    assert race_of(model(), monkeypatch) is None
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    assert race_of(model(), monkeypatch) is None


def test_there_is_no_race_without_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert race_of(nn.Sequential(nn.Flatten(), nn.Linear(3072, 4)), monkeypatch) is None


@pytest.mark.gpu
@pytest.mark.parametrize("benchmark", [False, True])
def test_trials_on_a_device_leave_its_memory_and_its_limit(
    benchmark: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    device = torch.device("cuda", torch.cuda.current_device())
    net = model().to(device)
    call = Candidate.of(net, ((torch.rand(SAMPLES, 3, 128, 128, device=device),), {}), device)
    assert call is not None
    known: dict[Hashable, float] = {}
    search = Sectioning(call.trace, LEAST, chains(net), lambda _: True)
    before = torch.cuda.memory_allocated(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device)
    room = 4 * max(search.floor(())[1])
    clock = Timing(device, False, known)
    taken = Race(call, search, clock, gpu()).fastest([cut(8), cut(2)], room, [room])
    assert taken
    assert known
    assert all(0.0 < seconds < 1.0 for seconds in known.values())
    assert torch.cuda.memory_allocated(device) == before
    assert torch.cuda.get_per_process_memory_fraction(device) == allowed


def losses_within(budget: int | None) -> list[float]:
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
    net = nn.Sequential(*convolutions, nn.ReLU(), nn.AvgPool2d(8), nn.Flatten(1)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    x = torch.rand(32, 3, 256, 256, device="cuda")
    found = []
    with ExitStack() as stack:
        vm = None if budget is None else stack.enter_context(belady.virtualize(net, budget))
        for _ in range(8):
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        if vm is not None:
            assert "slices along the batch" in vm.report()
    return found


@pytest.mark.gpu
def test_slices_that_were_raced_train_as_plain_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    raced = []
    fastest = Race.fastest

    def noted(self: Race, *given: Any) -> Sections:
        raced.append(fastest(self, *given))
        return raced[-1]

    monkeypatch.setattr(Race, "fastest", noted)
    expected = losses_within(None)
    torch.cuda.empty_cache()
    # Each map is 512 MiB, and the backward of a convolution reads two and makes one.
    torch.testing.assert_close(losses_within(1 << 30), expected, rtol=1e-4, atol=0.0)
    assert raced


class Padded(nn.Conv2d):
    """Somebody's own."""


@pytest.mark.parametrize("own", [False, True])
def test_what_a_module_of_somebody_elses_does_is_not_tried(own: bool) -> None:
    net = model()
    if own:
        net[1] = Padded(8, 8, 3, padding=1)
    assert raced(net).knows_all == (not own)


@pytest.mark.parametrize(("share", "slices"), [(1.0, 8), (3.15, 32)])
def test_choices_are_raced_only_without_tensor_cores(
    share: float, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "workspace_share", lambda *_: share)
    trials = Trials({2: 0.5, 1: 0.1}, monkeypatch)
    net, call = model(), ((torch.rand(SAMPLES, 3, 32, 32),), {})
    whole = Sectioning(called(net).trace, LEAST, chains(net), lambda _: True)
    parts = Cutting(Policy("auto", Budget(int(0.9 * whole._needed(())[0]))), gpu(), CPU)
    assert parts.cut(KEY, net, call)
    assert bool(trials.asked) == (share > 1.0)
    assert {it.slices for it in parts._known[net][KEY].sections} == {slices}


@pytest.mark.parametrize(("samples", "cuts"), [(SAMPLES, False), (8, True)])
def test_what_fits_but_for_workspaces_runs_whole_where_that_is_faster(
    samples: int, cuts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "workspace_share", lambda *_: 3.15)
    # How many are worth it is for the race to say.
    monkeypatch.setattr(choice, "_FEW", 1)
    trials = Trials({samples: 0.1}, monkeypatch)
    net, call = model(), ((torch.rand(SAMPLES, 3, 32, 32),), {})
    search = Sectioning(called(net).trace, LEAST, chains(net), lambda _: True)
    budget, allocator = int(1.26 * search._needed(())[0]), Allocator(1, 0.05, 0)
    parts = Cutting(Policy("auto", Budget(budget)), replace(gpu(), allocator=allocator), CPU)
    assert parts.cut_for_workspaces(KEY, net, call) == cuts
    assert SAMPLES in {size for size, _ in trials.asked}
    assert (net in parts) == cuts
    # Whole or not, it was timed beside a margin.
    left = budget - allocator.peak_within(budget)
    assert parts.leaves_bytes(KEY, net) == left > 0
    assert parts.leaves_bytes((1,), net) == parts.leaves_bytes(KEY, nn.Linear(1, 1)) == 0
    parts.leave(budget // 4)
    assert parts.leaves_bytes(KEY, net) > budget // 4


@pytest.mark.parametrize(("net", "searches"), [(model(), 2), (nn.Sequential(nn.Linear(32, 4)), 1)])
def test_without_convolutions_sections_are_looked_for_once(
    net: nn.Sequential, searches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "workspace_share", lambda *_: 1.0)
    found = Searching(LEAST, CPU).in_turn(called(net))
    assert len(found) == searches
