"""What the verb ``kernels`` asks: digests, running ops again, and a convolution's algorithms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from belady.eager.digests import digest
from belady.measure.clock import clock_for
from belady.memory.allowance import allowance, pages
from benchmarks.cases import Record

GIB = 1 << 30
MIB = 1 << 20
# Beyond inputs and outputs.
ALLOWED_MIB = (1024, 64, 0)
PRECISIONS = ("fp32", "tf32", "bf16")
Make = Callable[[], Any]


class Asked(NamedTuple):
    """What all questions are asked about.

    ``images`` are the samples of a feature map, ``edge`` the pixels along an edge of the images of
    the convolution.
    """

    device: torch.device
    images: int
    edge: int
    repeats: int


def timed(device: torch.device, make: Make, repeats: int) -> tuple[float, int]:
    """Median seconds of ``make`` and the largest workspace, launch gaps left out."""
    make()
    clock = clock_for(device)
    for _ in range(repeats):
        clock.start()
        made = make()
        clock.stop()
        del made
    runs = clock.results()
    return median(seconds for seconds, _ in runs), max(workspace for _, workspace in runs)


def _digests(asked: Asked) -> Iterator[Record]:
    """One pass over the bytes, and what else would do."""
    size = (asked.images << 21,)
    content = torch.randint(0, 256, size, dtype=torch.uint8, device=asked.device)

    def columns(width: int, dtype: torch.dtype, dim: int) -> Make:
        words = content.view(dtype)
        table = words[: words.numel() // width * width].view(-1, width)
        return lambda: table.sum(dim, dtype=torch.int64)

    ways: dict[str, Make] = {
        "digest": lambda: digest(content),
        "columns of 1021 words": columns(1021, torch.int64, 0),
        "columns of 1024 words": columns(1024, torch.int64, 0),
        "columns of 8191 words": columns(8191, torch.int64, 0),
        "rows of 1021 words": columns(1021, torch.int64, 1),
        "columns of 1021 halves": columns(1021, torch.int32, 0),
        "copy": content.clone,
    }
    for name, make in ways.items():
        seconds, _ = timed(asked.device, make, asked.repeats)
        yield {"what": "digest", "way": name, "s_per_gib": seconds * GIB / content.numel()}


def _replays(asked: Asked) -> Iterator[Record]:
    """What it costs to make a GiB again, and whether the bits come out the same."""
    for precision in ("tf32", "bf16"):
        for last in (False, True):
            with precisely(precision):
                for name, make, cheaper in _ops(asked, half=precision == "bf16", last=last):
                    about = {"op": name, "precision": precision, "channels_last": last}
                    yield {"what": "replay", **about} | _replayed(asked, make, cheaper)


def _replayed(asked: Asked, make: Make, cheaper: Make | None) -> Record:
    first = make()
    seconds, _ = timed(asked.device, make, asked.repeats)
    nbytes = first.untyped_storage().nbytes()
    answer = {
        "dtype": str(first.dtype),
        "s_per_gib": seconds * GIB / nbytes,
        "same_bits": torch.equal(first, make()),
    }
    if cheaper is not None and asked.device.type == "cuda":
        seconds, _ = timed(asked.device, cheaper, asked.repeats)
        answer["shortcut_s_per_gib"] = seconds * GIB / nbytes
        answer["shortcut_same_bits"] = torch.equal(first, cheaper())
    return answer


def _ops(asked: Asked, *, half: bool, last: bool) -> Iterator[tuple[str, Make, Make | None]]:
    device, images = asked.device, asked.images
    dtype = torch.bfloat16 if half else torch.float32
    form = torch.channels_last if last else torch.contiguous_format

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    x = random(images, 64, 56, 56).contiguous(memory_format=form)
    scale, shift = torch.rand(2, 64, device=device)
    norm = torch.ops.aten.native_batch_norm.default
    arguments = (x, scale, shift, None, None, True, 0.1, 1e-5)
    _, mean, inverse = norm(*arguments)

    def again() -> torch.Tensor:
        made: torch.Tensor = torch.ops.aten.batch_norm_elemt.default(
            x, scale, shift, mean, inverse, 1e-5
        )
        return made

    yield "batch norm", lambda: norm(*arguments)[0], again
    yield "relu", lambda: torch.relu(x), None
    yield "add", lambda: x + x, None
    yield "max pool", lambda: F.max_pool2d(x, 3, 2, 1), None
    for size, into in ((3, 64), (1, 256)):
        weight = random(into, 64, size, size).contiguous(memory_format=form)
        yield (
            f"conv {size}x{size}, 64 to {into}",
            lambda w=weight, p=size // 2: F.conv2d(x, w, padding=p),
            None,
        )
    if last:
        return
    tokens, narrow = random(images * 64, 1024), random(1024, 4096)
    yield "matrix product, 1024 to 4096", lambda: tokens @ narrow, None
    yield "gelu", lambda: F.gelu(tokens), None
    yield "layer norm", lambda: F.layer_norm(tokens, (1024,)), None
    yield "softmax", lambda: torch.softmax(tokens, -1), None


@dataclass(frozen=True)
class Setting:
    """What decides the algorithm: flags of cuDNN, and MiB beyond inputs and outputs, if limited."""

    name: str
    flags: Mapping[str, bool]
    allowed_mib: int | None = None


# PyTorch keeps algorithms for each thread. Each row has a thread of its own, where one setting
# follows the other: what a limit did to the choice shows in the next.
SETTINGS = (
    (Setting("default", {}),),
    (Setting("benchmark", {"benchmark": True}),),
    (Setting("deterministic", {"deterministic": True}),),
    *(
        (
            Setting("before a limit", {}),
            Setting("limited", {"deterministic": True}, allowed_mib),
            Setting("limit lifted", {"deterministic": True}),
            Setting("after a limit", {}),
        )
        for allowed_mib in ALLOWED_MIB
    ),
)


def _convolutions(asked: Asked) -> Iterator[Record]:
    """Seconds and workspace of VGG's second convolution, by what decides its algorithm."""
    for precision in PRECISIONS:
        for last in (False, True):
            ways = _directions(asked, half=precision == "bf16", last=last)
            for row in SETTINGS:
                with ThreadPoolExecutor(1) as thread:
                    answers = thread.submit(_row, asked, ways, row, precision).result()
                yield from ({**answer, "channels_last": last} for answer in answers)


def _row(
    asked: Asked, ways: Mapping[str, Make], row: Sequence[Setting], precision: str
) -> list[Record]:
    return [
        {
            "what": "convolution",
            "way": way,
            "setting": setting.name,
            "limit_mib": next((it.allowed_mib for it in row if it.allowed_mib is not None), None),
            "precision": precision,
            "cudnn": torch.backends.cudnn.version(),
            "batch": asked.images,
            "edge": asked.edge,
            **_under(asked, make, setting, precision),
        }
        for setting in row
        for way, make in ways.items()
    ]


def _under(asked: Asked, make: Make, setting: Setting, precision: str) -> Record:
    """Seconds and workspace of ``make``, or what it said when no algorithm would do."""
    with ExitStack() as stack:
        if setting.allowed_mib is not None:
            nbytes = _output_bytes(make, precision) + setting.allowed_mib * MIB
            stack.enter_context(allowance(asked.device, nbytes))
        stack.enter_context(precisely(precision, **setting.flags))
        flags = {"allow_tf32": torch.backends.cudnn.allow_tf32}
        try:
            seconds, workspace = timed(asked.device, make, asked.repeats)
        except RuntimeError as error:
            return {**flags, "error": str(error).splitlines()[0]}
        return {**flags, "s": seconds, "workspace_bytes": workspace}


def _output_bytes(make: Make, precision: str) -> int:
    with precisely(precision):
        made = make()
    tensors = [made] if isinstance(made, torch.Tensor) else made
    return sum(pages(tensor.nbytes) for tensor in tensors if tensor is not None)


def _directions(asked: Asked, *, half: bool, last: bool) -> Mapping[str, Make]:
    """Forward and backward of a 3x3 convolution of 64 channels into 64."""
    like: dict[str, Any] = {
        "device": asked.device,
        "dtype": torch.bfloat16 if half else torch.float32,
    }
    form = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(asked.images, 64, asked.edge, asked.edge, **like).to(memory_format=form)
    w = torch.randn(64, 64, 3, 3, **like).to(memory_format=form)
    backward = torch.ops.aten.convolution_backward.default

    def gradients(mask: list[bool]) -> Make:
        rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)
        return lambda: backward(x, x, w, None, *rest)

    return {
        "forward": lambda: F.conv2d(x, w, padding=1),
        "backward": gradients([True, True, False]),
        "weight gradient": gradients([False, True, False]),
        "data gradient": gradients([True, False, False]),
    }


@contextmanager
def precisely(precision: str, **flags: bool) -> Iterator[None]:
    """Say all that decides which algorithms cuDNN and cuBLAS may take."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    # One by one: `torch.backends.cudnn.flags` switches cuDNN off unless told otherwise.
    wanted = {"enabled": True, "benchmark": False, "deterministic": False, **flags}
    wanted["allow_tf32"] = precision == "tf32"
    before = {name: getattr(cudnn, name) for name in wanted}
    before_matmul = matmul.allow_tf32
    try:
        for name, value in wanted.items():
            setattr(cudnn, name, value)
        matmul.allow_tf32 = wanted["allow_tf32"]
        yield
    finally:
        for name, value in before.items():
            setattr(cudnn, name, value)
        matmul.allow_tf32 = before_matmul


OF_KERNELS: Mapping[str, Callable[[Asked], Iterator[Record]]] = {
    "digest": _digests,
    "replay": _replays,
    "convolution": _convolutions,
}
