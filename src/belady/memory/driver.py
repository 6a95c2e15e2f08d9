"""What managed memory takes of CUDA's driver, which torch does not offer: no compiler is needed.

Functions are called by the names under which the driver has exported them since they exist, so that
no version of a header matters.
"""

from __future__ import annotations

import ctypes

import torch

from belady.errors import TierError
from belady.memory.blocks import Lease

LIBRARY = "libcuda.so.1"
_ATTACH_GLOBAL = 1
_CONCURRENT_MANAGED_ACCESS = 89
_SET_PREFERRED_LOCATION = 3
_HOST = -1  # as a device
_ON_DEVICE = 1  # as a kind of place


class _Place(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("number", ctypes.c_int))


class CudaDriver:
    """The driver's calls for one device, see `belady.memory.blocks.Driver`.

    Raises
    ------
    TierError
        If there is no driver, or the device cannot share managed memory with the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise TierError(f"managed memory takes CUDA's driver: {error}") from error
        self._number, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._demand("cuInit", ctypes.c_uint(0))
        self._demand("cuDeviceGet", ctypes.byref(self._number), ctypes.c_int(device.index or 0))
        able = ctypes.c_int()
        attribute = ctypes.c_int(_CONCURRENT_MANAGED_ACCESS)
        self._demand("cuDeviceGetAttribute", ctypes.byref(able), attribute, self._number)
        if not able.value:
            raise TierError(f"{device} cannot share managed memory with the host")
        # torch's own context, kept for the life of the process as torch does.
        self._demand("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._number)
        self._discards = hasattr(self._library, "cuMemDiscardAndPrefetchBatchAsync")

    def allocate(self, nbytes: int) -> int:
        """Take a block whose pages are at home on the device."""
        pointer = ctypes.c_uint64()
        size = ctypes.c_size_t(nbytes)
        self._within(
            "cuMemAllocManaged", ctypes.byref(pointer), size, ctypes.c_uint(_ATTACH_GLOBAL)
        )
        advice = ctypes.c_int(_SET_PREFERRED_LOCATION)
        try:
            self._within("cuMemAdvise", pointer, size, advice, self._number)
        except TierError:
            self._within("cuMemFree_v2", pointer)
            raise
        return pointer.value

    def free(self, pointer: int) -> None:
        """Give a block back once the device has done all its work."""
        torch.cuda.synchronize(self._device)
        self._within("cuMemFree_v2", ctypes.c_uint64(pointer))

    def prefetch(
        self, pointer: int, nbytes: int, *, here: bool, discard: bool, stream: int
    ) -> None:
        """Let a stream move the block; its pages are written back where none can be discarded.

        What is discarded on its way to the host stays until the driver needs the place.
        """
        if discard and self._discards:
            code = self._discard(pointer, nbytes, stream, here=here)
            if code == 0:
                return
            # Not on this device: never asked again.
            self._discards = False
        target = self._number if here else ctypes.c_int(_HOST)
        self._within(
            "cuMemPrefetchAsync",
            ctypes.c_uint64(pointer),
            ctypes.c_size_t(nbytes),
            target,
            ctypes.c_void_p(stream),
        )

    def free_bytes(self) -> int:
        """Bytes of the device that nobody has."""
        return int(torch.cuda.mem_get_info(self._device)[0])

    def tensor(self, lease: Lease) -> torch.Tensor:
        """Bytes of a block as a tensor that keeps the lease: no copy, as the address is known."""
        return torch.as_tensor(lease, device=self._device)

    def _discard(self, pointer: int, nbytes: int, stream: int, *, here: bool) -> int:
        one = ctypes.c_size_t(1)
        block = ctypes.byref(ctypes.c_uint64(pointer)), ctypes.byref(ctypes.c_size_t(nbytes)), one
        flags, on = ctypes.c_ulonglong(0), ctypes.c_void_p(stream)
        if not here:
            # To send pages without content to the host takes time nevertheless.
            return self._call("cuMemDiscardBatchAsync", *block, flags, on)
        place, all_of_them = _Place(_ON_DEVICE, self._number.value), ctypes.c_size_t(0)
        places = ctypes.byref(place), ctypes.byref(all_of_them), one
        return self._call("cuMemDiscardAndPrefetchBatchAsync", *block, *places, flags, on)

    def _call(self, name: str, *arguments: object) -> int:
        """Call in the device's context: a thread of autograd's may have none."""
        self._demand("cuCtxPushCurrent_v2", self._context)
        try:
            return int(getattr(self._library, name)(*arguments))
        finally:
            self._demand("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _within(self, name: str, *arguments: object) -> None:
        self._raise_for(name, self._call(name, *arguments))

    def _demand(self, name: str, *arguments: object) -> None:
        self._raise_for(name, int(getattr(self._library, name)(*arguments)))

    def _raise_for(self, name: str, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
            said = (text.value or b"unknown").decode("ascii", "replace")
            raise TierError(
                f"CUDA's driver refused {name} on {self._device}: {said} (error {code}); managed "
                "memory cannot be used, so take a policy that moves values to pinned host memory"
            )
