"""What the host spends on a plan's copies and encodings is counted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch

from belady.graph.contents import Content, Contents, CountedContents
from belady.graph.iteration import Iteration
from belady.graph.kinds import Kind
from belady.ir.plan import Encode, Offload
from belady.ir.trace import Tier
from belady.measure.monitor import Monitor
from belady.memory.carrier import Carrier

COPIED, ENCODED = 0, 1
SPENT = 2e-3


@pytest.fixture
def contents() -> Iterator[CountedContents]:
    carrier = Carrier("cpu")
    decisions = {COPIED: Offload(Tier.HOST, 0, 1, 2, 3), ENCODED: Encode("sign", 1, 1, 2)}
    yield CountedContents(carrier, decisions)
    carrier.close()


def held(contents: CountedContents, value: int, monkeypatch: pytest.MonkeyPatch) -> Content:
    """Have a value held, which takes a while."""
    made = Content.__init__

    def slowly(self: Content, *args: object, **kwargs: object) -> None:
        time.sleep(SPENT)
        made(self, *args, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Content, "__init__", slowly)
        return contents.hold(value, torch.ones(8), False)


def test_copies_are_told_from_encodings(
    contents: CountedContents, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = held(contents, COPIED, monkeypatch)
    assert contents.host_seconds >= SPENT
    assert contents.encoding_seconds == 0
    before = contents.host_seconds
    encoded = held(contents, ENCODED, monkeypatch)
    assert contents.encoding_seconds >= SPENT
    assert contents.host_seconds == pytest.approx(before + contents.encoding_seconds)
    assert copied is not encoded


def test_waiting_for_bytes_is_not_counted(contents: CountedContents) -> None:
    content = contents.hold(COPIED, torch.ones(8), False)
    for act in (contents.send, contents.free, contents.bring):
        act(COPIED)
    before = contents.host_seconds
    assert content.take().view(torch.float32).tolist() == [1.0] * 8
    assert contents.host_seconds == before


@pytest.mark.parametrize(("level", "counts"), [(0, False), (1, True), (2, True)])
def test_only_what_is_measured_is_counted(level: int, counts: bool) -> None:
    carrier, kind = Carrier("cpu"), Kind()
    kind.force = Mock(plan=Mock(decisions={}))
    sample = Monitor(torch.device("cpu"), carrier).begin(level)
    contents = Iteration.of(kind, carrier, None, None, sample).contents
    assert type(contents) is (CountedContents if counts else Contents)
    carrier.close()
