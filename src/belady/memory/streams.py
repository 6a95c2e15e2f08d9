"""The streams to which a program gives its work."""

from __future__ import annotations

import torch

_STREAMS: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Stream to which the calling thread's work on ``device`` goes; None on a CPU.

    It is asked for at every call, as the user may switch streams between two. One object stands for
    a stream wherever it is met, so it must not be entered as a context.
    """
    return of_thread(device.index) if device.type == "cuda" else None


def of_thread(index: int) -> torch.cuda.Stream:
    """Stream to which the calling thread's work on CUDA device ``index`` goes."""
    # torch makes an object each time, in several layers of Python, at every copy and wait.
    name = torch._C._cuda_getCurrentStream(index)
    stream = _STREAMS.get(name)
    if stream is None:
        stream = _STREAMS[name] = torch.cuda.current_stream(index)
    return stream
