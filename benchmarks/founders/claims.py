"""Headline figures of the founding papers, with what must be known to read them."""

from __future__ import annotations

from dataclasses import dataclass

VDNN = "vDNN (MICRO-49, 2016, arXiv 1602.08124)"
LAYRUB = "Layrub (TACO 15(3) 37, 2018)"
TVDNN = "tvDNN (PPoPP 2018, poster)"
OCDNN = "OC-DNN (OC-Caffe, HiPC 2018)"


@dataclass(frozen=True)
class Claim:
    """One published figure.

    Attributes
    ----------
    trap
        What it is often taken for and is not.
    machine
        Name in `benchmarks.founders.machines.MACHINES`, or empty where the paper names none.
    nets
        The networks that it is about, with their sizes, by our names; empty for what is an
        average over networks that we do not have.
    """

    system: str
    published: str
    trap: str
    source: str
    machine: str
    nets: tuple[tuple[str, int], ...]


CLAIMS = (
    Claim(
        VDNN,
        "VGG-16, batch 256, 28 GB at baseline, runs in 12 GB at 18 % below the oracle",
        "16 convolutions: what is now called VGG-19. The oracle is every layer timed alone with "
        "its fastest algorithm, and only feature extraction is timed",
        "sections IV-C, V-C",
        "Titan X",
        (("vgg19", 256),),
    ),
    Claim(
        VDNN,
        "89 / 91 / 95 % less memory: AlexNet, OverFeat, GoogLeNet, batch 128",
        "of the average over time; the peak falls by 49 to 73 % (means of six networks)",
        "section V-A",
        "Titan X",
        (("alexnet", 128), ("overfeat", 128), ("googlenet", 128)),
    ),
    Claim(
        VDNN,
        "VGG-16, batch 128, vDNN_all with memory-optimal algorithms: 4.8 of 12 GB, 61 % slower",
        "the static policies move although there is room; vDNN_dyn does not",
        "section V-C",
        "Titan X",
        (("vgg19", 128),),
    ),
    Claim(
        VDNN,
        "VGG-416, batch 32, 67.1 GB at baseline: up to 4.2 GB on the GPU, no noticeable loss",
        "81 to 92 % of the bytes are in host memory; loss against an oracle that cannot run",
        "section V-E",
        "Titan X",
        (("vgg116", 32), ("vgg416", 32)),
    ),
    Claim(
        LAYRUB,
        "58.2 % less memory on average, 24.1 % more time",
        "against Caffe, itself 2.7 to 3.7 times slower than TensorFlow and MXNet on ResNets",
        "section 5, table 5",
        "",
        (),
    ),
    Claim(
        LAYRUB,
        "ResNet-50, batch 32: 11,425 MB to 1,805 MB, 56.8 % more time",
        "the whole process by nvidia-smi; recomputation (MXNet) took 2,195 MB",
        "tables 5, 6",
        "K40m",
        (("resnet50", 32),),
    ),
    Claim(
        LAYRUB,
        "ResNet-1517, batch 32, trains on a 12 GB card (11,239 MB)",
        "the 98.9 % of ResNet-1001 count activations and their gradients alone",
        "table 6",
        "K40m",
        (("resnet1517", 32),),
    ),
    Claim(
        TVDNN,
        "VGG-16, batch 256 or 512, in a few GB without significant degradation",
        "only the abstract is public: no hardware, no further figure",
        "abstract",
        "",
        (),
    ),
    Claim(
        OCDNN,
        "AlexNet, batch 1,200 beside 1,100 in core: about 1,450 of 1,480 images/s",
        "memory is exceeded by 5 to 12 %; 1.9 and 5 times faster are against its own naive version "
        "and a CPU",
        "table and bar charts of section 6",
        "V100",
        (("alexnet", 1200),),
    ),
    Claim(
        OCDNN,
        "VGG-19, batch 120 beside 110 in core: about 34 of 130 images/s",
        "likewise: a cliff right after the limit",
        "bar charts of section 6",
        "V100",
        (("vgg19", 120),),
    ),
    Claim(
        OCDNN,
        "ResNet-50, batch 45 beside 40 in core: about 17 of 132 images/s",
        "likewise; Caffe without reuse of buffers holds far more than PyTorch does",
        "bar charts of section 6",
        "V100",
        (("resnet50", 45),),
    ),
)
