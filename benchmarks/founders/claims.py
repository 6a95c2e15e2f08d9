"""Figures of the founding papers, with what must be known to read them."""

from __future__ import annotations

from dataclasses import dataclass

VDNN = "vDNN (MICRO-49, 2016, arXiv 1602.08124)"
LAYRUB = "Layrub (TACO 15(3) 37, 2018)"
TVDNN = "tvDNN (PPoPP 2018, poster)"
OCDNN = "OC-DNN (OC-Caffe, HiPC 2018)"
CAPUCHIN = "vDNN as Capuchin measured it (ASPLOS 2020)"
# Percent of a network-wide allocation that vDNN saves on average over time, and at which batch.
AVERAGE_LESS, AVERAGE_BATCH = {"alexnet": 89, "overfeat": 91, "googlenet": 95}, 128


@dataclass(frozen=True)
class Net:
    """A network of a claim.

    Attributes
    ----------
    workload
        Our name of it.
    memory
        What the paper ran it in, or asks for, where that is less than its machine has.
    seconds
        An iteration with everything kept on the paper's machine, as printed; 0 where it is not.
    """

    workload: str
    batch: int
    memory: str = ""
    seconds: float = 0.0


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
        The networks that it is about; none for what is an average over networks that we do not
        have.
    policy
        Of ours, what stands for the system.
    """

    system: str
    published: str
    trap: str
    source: str
    machine: str
    nets: tuple[Net, ...]
    policy: str = "auto"


CLAIMS = (
    Claim(
        VDNN,
        "VGG-16, batch 256, 28 GB at baseline, runs in 12 GB at 18 % below the oracle",
        "16 convolutions: what is now called VGG-19. The oracle is every layer timed alone with "
        "its fastest algorithm, and only feature extraction is timed; 18 % less throughput is 22 % "
        "more time",
        "sections IV-C, V-C",
        "Titan X",
        (Net("vgg19", 256),),
        "vdnn_dyn",
    ),
    Claim(
        VDNN,
        f"{' / '.join(map(str, AVERAGE_LESS.values()))} % less memory: AlexNet, OverFeat, "
        f"GoogLeNet, batch {AVERAGE_BATCH}",
        "of the average over time; the peak falls by 49 to 73 % (means of six networks)",
        "section V-A",
        "Titan X",
        tuple(Net(name, AVERAGE_BATCH) for name in AVERAGE_LESS),
        "vdnn_all",
    ),
    Claim(
        VDNN,
        "VGG-16, batch 128, vDNN_all with memory-optimal algorithms: 4.8 of 12 GB, throughput "
        "61 % lower",
        "the static policies move although there is room; vDNN_dyn does not. Much of the loss is "
        "that of algorithms without workspace, of which the simulation has none; it is 156 % more "
        "time",
        "section V-C",
        "Titan X",
        (Net("vgg19", 128, "4.8GB"),),
        "vdnn_all",
    ),
    Claim(
        VDNN,
        "VGG-416, batch 32, 67.1 GB at baseline: up to 4.2 GB on the GPU, no noticeable loss",
        "81 to 92 % of the bytes are in host memory; loss against an oracle that cannot run",
        "section V-E",
        "Titan X",
        (Net("vgg116", 32, "4.2GB"), Net("vgg416", 32, "4.2GB")),
        "vdnn_dyn",
    ),
    Claim(
        CAPUCHIN,
        "largest batches of vDNN on a P100: ResNet-50 520, ResNet-152 330; it loses up to 70.0 and "
        "74.4 %",
        "of throughput, that is 233 and 291 % more time; at which batch is not said, shown at the "
        "largest",
        "section 6, table 2",
        "P100",
        (Net("resnet50", 520), Net("resnet152", 330)),
        "vdnn_all",
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
        "AlexNet 21.9 %, VGGNet 20.6 % more time",
        "against Caffe, as above; the batches are those that it calls normal elsewhere",
        "table 5",
        "K40m",
        (Net("alexnet", 128, seconds=20.808 / 20), Net("vgg16", 64, seconds=91.815 / 20)),
        "layrub_hybrid",
    ),
    Claim(
        LAYRUB,
        "ResNet-50, batch 32: 11,425 MB to 1,805 MB, 56.8 % more time",
        "the whole process by nvidia-smi; recomputation (MXNet) took 2,195 MB",
        "tables 5, 6",
        "K40m",
        (Net("resnet50", 32, "1805MiB", 55.131 / 20),),
        "layrub_hybrid",
    ),
    Claim(
        LAYRUB,
        "ResNet-1001, batch 32, in 7,901 MB, and ResNet-1517 in 11,239 MB",
        "the 98.9 % of ResNet-1001 count activations and their gradients alone; recomputation "
        "(MXNet) was faster, 324 s against 712 s, but ended at ResNet-1172",
        "tables 5, 6",
        "K40m",
        (Net("resnet1001", 32, "7901MiB"), Net("resnet1517", 32, "11239MiB")),
        "layrub_hybrid",
    ),
    Claim(
        LAYRUB,
        "largest batches on 11,580 MB: AlexNet 2,100, VGGNet 240, ResNet-50 272",
        "the ratios that the paper prints do not agree with these",
        "section 5",
        "K40m",
        (Net("alexnet", 2100), Net("vgg16", 240), Net("resnet50", 272)),
        "layrub_hybrid",
    ),
    Claim(
        TVDNN,
        "VGG-16, batch 256 or 512, in a few GB without significant degradation",
        "only the abstract is public: no hardware, no further figure. Shown: a Titan X, 4 GiB",
        "abstract",
        "Titan X",
        (Net("vgg16", 256, "4GiB"), Net("vgg16", 512, "4GiB")),
        "tvdnn_ilp",
    ),
    Claim(
        OCDNN,
        "AlexNet, batch 1,200 beside 1,100 in core: about 1,450 of 1,480 images/s",
        "memory is exceeded by 5 to 12 %; 1.9 and 5 times faster are against its own naive version "
        "and a CPU",
        "table and bar charts of section 6",
        "V100",
        (Net("alexnet", 1200, seconds=1200 / 1480),),
    ),
    Claim(
        OCDNN,
        "VGG-19, batch 120 beside 110 in core: about 34 of 130 images/s",
        "likewise: a cliff right after the limit",
        "bar charts of section 6",
        "V100",
        (Net("vgg19", 120, seconds=120 / 130),),
    ),
    Claim(
        OCDNN,
        "GoogLeNet, batch 210 beside 200 in core: about 260 of 620 images/s",
        "likewise; about 4.7 times as fast as its own naive version",
        "bar charts of section 6",
        "V100",
        (Net("googlenet", 210, seconds=210 / 620),),
    ),
    Claim(
        OCDNN,
        "ResNet-50, batch 45 beside 40 in core: about 17 of 132 images/s",
        "likewise; Caffe without reuse of buffers holds far more than PyTorch does",
        "bar charts of section 6",
        "V100",
        (Net("resnet50", 45, seconds=45 / 132),),
    ),
)
