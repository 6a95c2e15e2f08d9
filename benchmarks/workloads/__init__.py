"""Workloads by name. Packages that a machine may lack are imported when a workload is made."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from benchmarks.workloads.base import Recipe, Setting, Workload
from benchmarks.workloads.chains import alexnet, overfeat, toy_alexnet, toy_overfeat, toy_vgg, vgg
from benchmarks.workloads.graphs import (
    dag,
    googlenet,
    lstm,
    toy_dag,
    toy_googlenet,
    toy_lstm,
)
from benchmarks.workloads.residual import resnet, toy_resnet
from benchmarks.workloads.transformers import gpt2, llama, toy_gpt2, toy_llama, toy_vit, vit

__all__ = ["WORKLOADS", "Recipe", "Setting", "Workload"]


def _deep_vgg(last: int, depth: int) -> Recipe:
    """Its toy has ``last`` convolutions in each of its last groups."""
    return Recipe(vgg, partial(toy_vgg, groups=(1, last, last)), {"depth": depth, "batch": 32})


def _deep_resnet(third: int, **sizes: int) -> Recipe:
    """Its toy has ``third`` bottlenecks in the third stage, where the deep ones have most."""
    return Recipe(resnet, partial(toy_resnet, stages=(2, 1, third, 1)), sizes)


WORKLOADS: Mapping[str, Recipe] = {
    "alexnet": Recipe(alexnet, toy_alexnet),
    "overfeat": Recipe(overfeat, toy_overfeat),
    "googlenet": Recipe(googlenet, toy_googlenet),
    "vgg16": Recipe(vgg, partial(toy_vgg, groups=(1, 1, 2)), {"depth": 16}),
    "vgg19": Recipe(vgg, toy_vgg, {"depth": 19}),
    "vgg116": _deep_vgg(3, depth=116),
    "vgg216": _deep_vgg(4, depth=216),
    "vgg316": _deep_vgg(5, depth=316),
    "vgg416": _deep_vgg(6, depth=416),
    "resnet50": Recipe(resnet, toy_resnet),
    "resnet152": _deep_resnet(2, depth=152, batch=128),
    "resnet1001": _deep_resnet(3, depth=1001, batch=32),
    "resnet1517": _deep_resnet(4, depth=1517, batch=32),
    "resnet2507": _deep_resnet(5, depth=2507, batch=16),
    "vit": Recipe(vit, toy_vit),
    "gpt2": Recipe(gpt2, toy_gpt2),
    "llama": Recipe(llama, toy_llama),
    "dag": Recipe(dag, toy_dag),
    "lstm": Recipe(lstm, toy_lstm),
}
