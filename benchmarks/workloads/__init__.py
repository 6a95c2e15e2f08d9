"""Workloads by name. Packages that a machine may lack are imported when a workload is made."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.workloads.base import Recipe, Setting, Workload
from benchmarks.workloads.chains import alexnet, overfeat, toy_vgg, vgg
from benchmarks.workloads.graphs import (
    dag,
    googlenet,
    lstm,
    toy_dag,
    toy_lstm,
)
from benchmarks.workloads.residual import resnet, toy_resnet
from benchmarks.workloads.transformers import gpt2, llama, toy_llama, toy_vit, vit

__all__ = ["WORKLOADS", "Recipe", "Setting", "Workload"]

WORKLOADS: Mapping[str, Recipe] = {
    "alexnet": Recipe(alexnet, toy_vgg),
    "overfeat": Recipe(overfeat, toy_vgg),
    "googlenet": Recipe(googlenet, toy_dag),
    "vgg16": Recipe(vgg, toy_vgg, {"depth": 16}),
    "vgg19": Recipe(vgg, toy_vgg, {"depth": 19}),
    "vgg116": Recipe(vgg, toy_vgg, {"depth": 116, "batch": 32}),
    "vgg216": Recipe(vgg, toy_vgg, {"depth": 216, "batch": 32}),
    "vgg316": Recipe(vgg, toy_vgg, {"depth": 316, "batch": 32}),
    "vgg416": Recipe(vgg, toy_vgg, {"depth": 416, "batch": 32}),
    "resnet50": Recipe(resnet, toy_resnet),
    "resnet152": Recipe(resnet, toy_resnet, {"depth": 152, "batch": 128}),
    "resnet1001": Recipe(resnet, toy_resnet, {"depth": 1001, "batch": 32}),
    "resnet1517": Recipe(resnet, toy_resnet, {"depth": 1517, "batch": 32}),
    "vit": Recipe(vit, toy_vit),
    "gpt2": Recipe(gpt2, toy_llama),
    "llama": Recipe(llama, toy_llama),
    "dag": Recipe(dag, toy_dag),
    "lstm": Recipe(lstm, toy_lstm),
}
