"""Tensors are laid out on bytes as they were, plain, and unseen by modes of the user."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from belady.ir.trace import Tier
from belady.memory import geometry
from belady.memory.carrier import Carrier
from belady.memory.contents import Moved
from belady.memory.geometry import Geometry, content_of
from belady.memory.witness import witness
from tests.support.modes import Seeing


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return content_of(tensor, 0, tensor.untyped_storage().nbytes())


def odd_bytes() -> torch.Tensor:
    """Floats on a storage that is no whole number of them."""
    return torch.empty(0).set_(torch.arange(11, dtype=torch.uint8).untyped_storage(), 0, (2,), (1,))


LAYOUTS: list[Callable[[], torch.Tensor]] = [
    lambda: torch.randn(3, 4),
    lambda: torch.randn(3, 4).t(),
    lambda: torch.randn(5, 6)[1:, ::2],
    lambda: torch.randn(4, 1).expand(4, 3),
    lambda: torch.tensor(2.0),
    lambda: torch.empty(0, 3),
    lambda: torch.randn(4, dtype=torch.complex64).conj(),
    lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    lambda: torch.randn(4, dtype=torch.complex64),
    lambda: torch.randn(4, dtype=torch.complex64).imag,
    lambda: torch.randn(6) > 0,
    lambda: torch.randn(3, 5).to(torch.bfloat16)[1],
    odd_bytes,
]


@pytest.mark.parametrize("make", LAYOUTS)
def test_it_is_laid_out_as_it_was(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    geometry = Geometry.of(tensor)
    again = geometry.on(bytes_of(tensor))
    assert Geometry.of(again) == geometry
    assert torch.equal(again.resolve_conj().resolve_neg(), tensor.resolve_conj().resolve_neg())
    assert again.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("make", LAYOUTS)
def test_it_is_laid_out_on_bytes_that_lie_elsewhere(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    geometry = Geometry.of(tensor)
    start, stop = geometry.span()
    moved = content_of(tensor, start, stop).clone()
    again = geometry.on(moved, start)
    assert again.shape == tensor.shape
    assert torch.equal(again.resolve_conj().resolve_neg(), tensor.resolve_conj().resolve_neg())


def test_bytes_are_shared_by_types_that_begin_between_their_own() -> None:
    storage = torch.arange(16, dtype=torch.uint8)
    geometry = Geometry(torch.int32, torch.Size([2]), (1,), 1, False, False)
    again = geometry.on(content_of(storage, 2, 14), skipped_bytes=2)
    assert torch.equal(again, storage.view(torch.int32)[1:3])


@pytest.mark.parametrize("make", LAYOUTS)
def test_only_what_lies_the_same_way_is_of_it(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    known = [Geometry.of(other()) for other in LAYOUTS]
    assert [geometry.is_of(tensor) for geometry in known] == [
        geometry == Geometry.of(tensor) for geometry in known
    ]


def test_each_has_a_version_of_its_own_and_no_history() -> None:
    content = bytes_of(torch.randn(4, requires_grad=True))
    first, second = (Geometry.of(torch.randn(4)).on(content) for _ in range(2))
    shadow, before = witness(second), second._version
    first.add_(1.0)
    assert (content._version, second._version, shadow._version) == (0, before, before)
    assert not first._is_view()
    assert not first.requires_grad
    assert torch.equal(first, second)


def test_a_mode_of_the_user_sees_nothing_of_it() -> None:
    tensor = torch.randn(3, 4)
    with Seeing() as mode:
        Geometry.of(tensor).on(bytes_of(tensor))
        shadow = witness(tensor)
        assert mode.ops == []
        tensor.add_(1.0)
    assert mode.ops == [torch.ops.aten.add_.Tensor]
    assert shadow._version == tensor._version


def test_bytes_first_asked_for_in_inference_mode_can_be_used_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(geometry, "_NOTHING", {})
    tensor = torch.ones(2)
    with torch.inference_mode():
        assert not content_of(tensor, 0, 8).is_inference()
    content = content_of(tensor, 4, 8)
    assert not content.is_inference()
    assert content.view(torch.float32).tolist() == [1.0]
    assert content._version == 0


def test_a_mode_of_the_user_sees_no_copy_of_it() -> None:
    carrier, tensor = Carrier("cpu"), torch.arange(4.0)
    moved = Moved(tensor, 0, 16, carrier)
    with Seeing() as mode:
        moved.send(Tier.HOST)
        moved.free()
        moved.bring()
        content = moved.take()
    assert mode.ops == []
    assert content.view(torch.float32).tolist() == [0.0, 1.0, 2.0, 3.0]
    carrier.close()
