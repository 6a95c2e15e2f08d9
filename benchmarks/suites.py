"""Named lists of cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product

from benchmarks.cases import OURS, Case

NETS = ("alexnet", "googlenet", "resnet50", "vgg19")
PRECISIONS = ("tf32", "bf16", "fp32")
VDNN = tuple(OURS + name for name in ("vdnn_conv", "vdnn_all", "vdnn_dyn"))
POLICIES = tuple(OURS + name for name in ("auto", "lifetime", "floor"))
PEER_NAMES = (
    "plain",
    "checkpoint",
    "selective",
    "save_on_cpu",
    "checkpoint+save_on_cpu",
    "trl",
    "torchtune",
    "deepspeed",
    "inductor",
    "inductor-0.7",
    "inductor-0.5",
    "inductor-0.25",
    "inductor-0",
)


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
        for share in ("75%", "50%", "33%"):
            yield Case(net, OURS + "auto", share, "bf16", channels_last=layout, shared=True)
    for precision in ("tf32", "fp32"):
        yield Case("vgg19", OURS + "auto", "12GiB", precision)


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


def _toy() -> Iterable[Case]:
    """Everything once, in a minute, on a CPU."""
    toy = {"device": "cpu", "toy": True, "precision": "fp32", "repeats": 2, "shared": True}
    for net in ("resnet50", "llama"):
        for method in ("plain", "checkpoint", "save_on_cpu"):
            yield Case(net, method, "none", equal_steps=2, **toy)
        yield Case(net, OURS + "floor", "own", equal_steps=6, **toy)
        yield Case(net, OURS + "lifetime", "80%", **toy)


SUITES: Mapping[str, Callable[[], Iterable[Case]]] = {
    "fits": _fits,
    "plain": _plain,
    "founders": _founders,
    "shares": _shares,
    "save_on_cpu": _save_on_cpu,
    "peers": _peers,
    "oracle": _oracle,
    "toy": _toy,
}
