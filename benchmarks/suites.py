"""Named lists of cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from benchmarks.cases import BOUND, LAUNCHED, OURS, OWN, Case
from benchmarks.founders.claims import AVERAGE_BATCH, AVERAGE_LESS

NETS = ("alexnet", "googlenet", "resnet50", "vgg19")
PRECISIONS = ("tf32", "bf16", "fp32")
VDNN = tuple(OURS + name for name in ("vdnn_conv", "vdnn_all", "vdnn_dyn"))
POLICIES = tuple(OURS + name for name in ("auto", "lifetime", "floor"))
_COMPILERS = (
    "inductor",
    "inductor-0.7",
    "inductor-0.5",
    "inductor-0.25",
    "inductor-0",
    "inductor+checkpoint",
)
PEER_NAMES = (
    "plain",
    "checkpoint",
    "selective",
    "save_on_cpu",
    "checkpoint+save_on_cpu",
    "trl",
    "torchtune",
    "deepspeed",
    *_COMPILERS,
    *(name + LAUNCHED for name in _COMPILERS),
)
FRONTIER = "frontier"
# Steps of ours before results are compared with plain's: observed, verified, and by the plan.
_EQUAL_STEPS = 4
# What a user without a library would pick. Of transformers trainers offer TRL's offloading too.
_ANYWHERE = ("checkpoint", "save_on_cpu", "checkpoint+save_on_cpu")
_COMPILED = ("inductor-0.7", "inductor-0.5", "inductor-0.25")
_CHECKPOINTED = "inductor+checkpoint"
# Of those launched as CUDA graphs the fastest, a budget, and what needs least.
_LAUNCHED = tuple(name + LAUNCHED for name in ("inductor", "inductor-0.5", _CHECKPOINTED))
# Workload, precision, and the batch where it is not the workload's own.
_FRONTIERS = (
    ("alexnet", "tf32", None),
    ("overfeat", "tf32", None),
    ("vgg16", "fp32", 256),
    ("vgg19", "tf32", None),
    ("vgg116", "tf32", None),
    ("resnet50", "bf16", None),
    ("resnet152", "bf16", None),
    ("resnet1517", "bf16", None),
    ("googlenet", "bf16", None),
    ("dag", "bf16", None),
    ("lstm", "bf16", None),
    ("vit", "bf16", 128),
    ("gpt2", "bf16", 16),
    ("llama", "bf16", None),
)
# A host issues their ops more slowly than the device runs them, or about as fast once hooks are on.
_HOST_BOUND = ("resnet50", "resnet152", "resnet1517", "googlenet", "dag", "lstm", "vit", "gpt2")


def _fits() -> Iterable[Case]:
    """When everything fits: plain and ours in turn, so that a drifting machine cancels out."""
    for method in ("plain", OURS + "auto") * 2:
        yield Case("resnet50", method, precision="bf16", channels_last=True)


def _plain() -> Iterable[Case]:
    return (Case(net, "plain", precision=precision) for precision, net in product(PRECISIONS, NETS))


def _founders() -> Iterable[Case]:
    """The vDNN policies, each under a cap of its own predicted peak plus the stated margin."""
    for precision, net, method in product(PRECISIONS, NETS, VDNN):
        yield Case(net, method, "own", precision, shared=True)


def _shares() -> Iterable[Case]:
    """The default policy at shares of the plain peak, and where only slices of an op fit."""
    for net, layout in (("resnet50", False), ("resnet50", True), ("vit", False), ("gpt2", False)):
        yield Case(net, "plain", precision="bf16", channels_last=layout)
        for share, steps in (("75%", 0), ("50%", _EQUAL_STEPS), ("33%", 0)):
            yield Case(net, OURS + "auto", share, "bf16", channels_last=layout, equal_steps=steps)
    for precision in ("tf32", "fp32"):
        yield Case("vgg19", OURS + "auto", "12GiB", precision, equal_steps=_EQUAL_STEPS)


def _targets() -> Iterable[Case]:
    """Ours within what a peer needs or a paper printed, beside plain and the peer."""
    for layout in (True, False):
        yield from _against_peers("resnet50", ("checkpoint",), channels_last=layout)
        for engine in ("belady", "belady-graph"):
            yield Case("resnet50", f"{engine}:auto", "50%:checkpoint", "bf16", layout)
    yield from _against_compiled("resnet50", channels_last=True)
    for budget in ("6.45GiB", "5.9GiB", "4.5GiB", "3GiB"):
        yield Case("resnet50", "belady-inductor:auto", budget, "bf16", channels_last=True)
    for precision, budget in (("tf32", "12GiB"), ("fp32", "12GiB"), ("bf16", "6GiB")):
        yield from _within("vgg19", budget, ("belady-graph:auto", OURS + "vdnn_dyn"), precision)
    for batch in (256, 512):
        others = "belady-graph:auto", OURS + "tvdnn_ilp", OURS + "tvdnn_greedy"
        yield from _within("vgg16", "4GiB", others, batch=batch)
    # nvidia-smi's MB are MiB.
    others = ("belady-graph:auto", OURS + "layrub_hybrid", "checkpoint")
    yield from _within("resnet1517", "11239MiB", others)
    # Layup's ResNet-2504 (doi 10.1145/3357238) in 12 GB: a depth of bottlenecks beyond it.
    yield from _within("resnet2507", "12GB", ("belady-graph:auto",))
    # The host takes longer than kernels do, or about as long.
    for net, share in (("lstm", "50%"), ("dag", "33%")):
        yield from _within(net, share, ("belady-graph:auto", "checkpoint"), "bf16")
    yield from _within("vgg416", "4.2GB", (OURS + "vdnn_dyn",))
    peers = ("checkpoint", "save_on_cpu", "checkpoint+save_on_cpu")
    for net, sizes in (
        ("googlenet", {}),
        ("resnet152", {}),
        ("vit", {"batch": 128}),
        ("gpt2", {"batch": 16}),
    ):
        yield from _against_peers(net, peers, sizes=tuple(sizes.items()))
        yield from _against_compiled(net, sizes=tuple(sizes.items()))


def _against_peers(net: str, peers: Iterable[str], **setting: Any) -> Iterable[Case]:
    """Plain, each peer at its smallest cap, and the default policy at those caps."""
    yield Case(net, "plain", "none", "bf16", **setting)
    for peer in peers:
        yield Case(net, peer, "smallest", "bf16", **setting)
    for peer in peers:
        yield Case(net, OURS + "auto", f"100%:{peer}", "bf16", equal_steps=_EQUAL_STEPS, **setting)


def _against_compiled(net: str, **setting: Any) -> Iterable[Case]:
    """Inductor by five budgets of its own and with checkpoints, and ours with its kernels.

    Each at its smallest cap; ours also at that of checkpoints that are not compiled, and not at
    those of CUDA graphs: they need more than what is issued. Results are not compared with plain's,
    which has other kernels.
    """
    yield Case(net, "inductor", "none", "bf16", **setting)
    for peer in (*_COMPILERS, *_LAUNCHED):
        yield Case(net, peer, "smallest", "bf16", **setting)
    for peer in ("checkpoint", *_COMPILERS):
        yield Case(net, "belady-inductor:auto", f"100%:{peer}", "bf16", **setting)


def _within(
    net: str, budget: str, others: Iterable[str], precision: str = "fp32", **sizes: int
) -> Iterable[Case]:
    """Plain, and the default policy and others within one budget."""
    given = tuple(sizes.items())
    yield Case(net, "plain", "none", precision, sizes=given)
    for method in (OURS + "auto", *others):
        steps = _EQUAL_STEPS if method.startswith(OWN) else 0
        yield Case(net, method, budget, precision, sizes=given, equal_steps=steps)


def _save_on_cpu() -> Iterable[Case]:
    """At the peak that save_on_cpu needs, and at two budgets above."""
    for method in ("plain", "save_on_cpu"):
        yield Case("resnet50", method, precision="bf16")
    for method, budget in (
        ("floor", "own"),
        ("lifetime", "own"),
        ("auto", "4GiB"),
        ("auto", "6GiB"),
    ):
        yield Case("resnet50", OURS + method, budget, "bf16", shared=budget == "own")


def _ocdnn() -> Iterable[Case]:
    """OC-DNN's policy in core and at 1/1.1, 1/2 and 1/4 of plain's peak, beside the default one."""
    for net in ("resnet50", "vgg19", "googlenet", "alexnet"):
        yield Case(net, "plain", "none", "tf32")
        for budget in ("none", "91%", "50%", "25%"):
            for method in ("ocdnn_opt", "auto"):
                yield Case(net, OURS + method, budget, "tf32")


def _average() -> Iterable[Case]:
    """vDNN's figures of average memory: its policy, and the default one in less and less.

    ``auto`` without a cap keeps everything, and so shows what plain holds.
    """
    setting: dict[str, Any] = {"precision": "fp32", "sizes": (("batch", AVERAGE_BATCH),)}
    for net in AVERAGE_LESS:
        yield Case(net, "plain", **setting)
        yield Case(net, OURS + "auto", **setting)
        yield Case(net, OURS + "vdnn_all", "own", **setting)
        for budget in ("75%", "50%", "33%", "25%", "smallest"):
            yield Case(net, OURS + "auto", budget, **setting)


def _peers() -> Iterable[Case]:
    """Every method at its smallest passing cap, and whether results equal plain's."""
    for method in (*PEER_NAMES, OURS + "auto"):
        yield Case("resnet50", method, "smallest", "bf16", equal_steps=6)


def _oracle() -> Iterable[Case]:
    """Torch's own switches that change what everything is measured against."""
    for benchmark, layout, net in product((True, False), (False, True), ("resnet50", "vgg19")):
        for precision in ("tf32", "bf16"):
            yield Case(
                net,
                "plain",
                precision=precision,
                channels_last=layout,
                cudnn_benchmark=benchmark,
            )


def frontier_of(
    net: str,
    peers: Iterable[str],
    policies: Iterable[str] = (OURS + "auto",),
    ladder: Iterable[int] = (75, 50, 33),
    equal_steps: int = 2,
) -> Iterable[Case]:
    """Memory against time of one workload.

    Ours at a ladder of budgets, in percent of plain's peak of allocated bytes; the bound at the
    same ladder; each peer at its smallest passing cap; the bound and ours at the cap of each peer;
    at last ours at its own smallest passing cap, which takes longest. What is most telling comes
    first, as the time may be up at any case. Bounds share a process: one run without a cap serves
    those of the ladder, and another, once they are known, those of the caps. Ours
    has one for each budget, as peers have: what cuDNN takes where there is room for large
    workspaces would stay with it where there is none, and the other way round. Results are compared
    with plain's in the middle of the ladder and at the end.
    """
    peers, policies, ladder = tuple(peers), tuple(policies), tuple(ladder)
    yield Case(net, "plain", "none")
    for method, percent in product((BOUND, *policies), ladder):
        compared = method != BOUND and percent == ladder[len(ladder) // 2]
        steps = _ours_steps(equal_steps) if compared else 0
        yield Case(net, method, f"{percent}%", equal_steps=steps, shared=method == BOUND)
    for method in peers:
        yield Case(net, method, "smallest", equal_steps=equal_steps)
    for method, peer in product((BOUND, *policies), peers):
        yield Case(net, method, f"100%:{peer}", shared=method == BOUND)
    for policy in policies:
        yield Case(net, policy, "smallest", equal_steps=_ours_steps(equal_steps))


def _ours_steps(equal_steps: int) -> int:
    """Enough that most of them run by the plan: the first is observed and the next verified."""
    return equal_steps and equal_steps + 2


def _frontier() -> Iterable[Case]:
    """Fourteen workloads with the peers that run anywhere, one shape and precision each.

    Where the host is what takes long, ours runs in captured graphs too.
    """
    for net, precision, batch in _FRONTIERS:
        peers = (*_ANYWHERE, "trl") if net in ("vit", "gpt2", "llama") else _ANYWHERE
        ours = (OURS + "auto", *(("belady-graph:auto",) if net in _HOST_BOUND else ()))
        setting: dict[str, Any] = {"precision": precision, "channels_last": net == "resnet50"}
        if batch is not None:
            setting["sizes"] = (("batch", batch),)
        for case in frontier_of(net, peers, ours):
            yield replace(case, **setting)


def _toy() -> Iterable[Case]:
    """Everything once, in a minute, on a CPU."""
    toy = {"device": "cpu", "toy": True, "precision": "fp32", "repeats": 2, "shared": True}
    for method in ("plain", "checkpoint", "save_on_cpu"):
        yield Case("resnet50", method, "none", equal_steps=2, **toy)
    yield Case("resnet50", OURS + "floor", "own", equal_steps=6, **toy)
    yield Case("resnet50", OURS + "lifetime", "80%", **toy)
    # Dropout: random numbers have to be the same.
    for method, budget in (("plain", "none"), (OURS + "floor", "own")):
        yield Case("gpt2", method, budget, equal_steps=6, **toy)


SUITES: Mapping[str, Callable[[], Iterable[Case]]] = {
    "fits": _fits,
    "plain": _plain,
    "founders": _founders,
    "shares": _shares,
    "targets": _targets,
    "save_on_cpu": _save_on_cpu,
    "ocdnn": _ocdnn,
    "average": _average,
    "peers": _peers,
    FRONTIER: _frontier,
    "oracle": _oracle,
    "toy": _toy,
}
