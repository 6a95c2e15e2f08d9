"""The bytes of a storage, on a device or meanwhile in host memory."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_Storage = torch.UntypedStorage


class Value:
    """The bytes of a storage that ops have made, here or elsewhere."""

    def __init__(self, number: int, storage: _Storage) -> None:
        self.number, self.nbytes = number, storage.nbytes()
        self._storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._elsewhere: torch.Tensor | None = None

    def there(self) -> _Storage | None:
        """The storage, unless nobody has it any more."""
        found: _Storage | None = _Storage._new_with_weak_ptr(self._storage.cdata)
        return found

    @property
    def address(self) -> int:
        """Where the bytes are; 0 where nobody has the storage, or it has none."""
        storage = self.there()
        return 0 if storage is None else storage.data_ptr()

    @property
    def movable(self) -> bool:
        """Whether the bytes can be given up: not where somebody else shows them."""
        storage = self.there()
        return storage is not None and storage.resizable()

    def copy_away(self) -> None:
        """Copy the bytes to host memory."""
        if (storage := self.there()) is not None:
            elsewhere = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
            self._elsewhere = elsewhere.copy_(_bytes_of(storage))

    def copy_back(self) -> None:
        """Copy the bytes to the device again."""
        if (storage := self.there()) is not None and self._elsewhere is not None:
            _bytes_of(storage).copy_(self._elsewhere)
        self._elsewhere = None

    def resize(self, nbytes: int) -> None:
        """Give up the device's bytes, or take others."""
        if (storage := self.there()) is not None:
            storage.resize_(nbytes)


def settle(device: torch.device) -> None:
    """Wait for copies of what is managed, which are under way."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _bytes_of(storage: _Storage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
