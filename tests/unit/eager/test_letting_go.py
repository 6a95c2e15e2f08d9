import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import belady


@pytest.fixture
def no_collection() -> Iterator[None]:
    # What the first optimizer of a process imports leaves its parameters in a cycle of torch's.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(("policy", "budget"), [("floor", "2MiB"), ("auto", "1GiB")])
@pytest.mark.usefixtures("no_collection")
def test_a_model_dies_with_its_last_name_once_its_memory_is_closed(
    policy: str, budget: str
) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with belady.virtualize(model, budget, policy=policy) as vm:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
    alive = weakref.ref(model), weakref.ref(model[0][0].weight)
    del model, optimizer
    assert [it() for it in alive] == [None, None]
    assert vm.run() is not None
