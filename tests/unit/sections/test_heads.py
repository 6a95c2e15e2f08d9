"""Attention in slices of heads: the numbers of plain PyTorch, and nothing else is touched."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from belady.errors import SectionError
from belady.ir.plan import Section
from belady.measure.batch import static_trace_with_batch
from belady.measure.static import static_trace
from belady.sections import headwise
from belady.sections.allowed import reasons
from belady.sections.gate import Gate
from belady.sections.heads import Heads
from belady.sections.headwise import slices_of
from belady.sections.wrap import wrap
from tests.unit.measure.watching import observed

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PLAIN = F.scaled_dot_product_attention
# Beside the largest number: bfloat16 by one rounding.
TOLERANCES = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2**-7}
ordinary = partial(sdpa_kernel, SDPBackend.MATH)
Tensors = list[Tensor | None]


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(headwise, "_LEAST_SLICE", 64)
    yield
    assert F.scaled_dot_product_attention is PLAIN


@contextmanager
def in_slices(
    least_bytes: int = 1,
    *,
    device: str = "cpu",
    open_gate: bool = True,
    roots: Sequence[nn.Module] = (),
) -> Iterator[Heads]:
    gate = Gate()
    if open_gate:
        gate.open(nn.Module())
    heads = Heads(torch.device(device), least_bytes, gate, roots)
    heads.attach()
    try:
        yield heads
    finally:
        heads.detach()


def made(
    shape: tuple[int, ...], keys: int, groups: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, as a projection gives them: tokens before heads.

    Values are wider than keys, which no fused kernel of a CPU takes.
    """
    *samples, heads, queries = shape
    torch.manual_seed(heads * queries + keys)

    def one(tokens: int, count: int, width: int) -> Tensor:
        found = torch.randn(*samples, tokens, count, width, dtype=torch.float64)
        return found.to(device, dtype).transpose(-2, -3)

    return one(queries, heads, 16), one(keys, groups, 16), one(keys, groups, 20)


def results(*tensors: Tensor | None, autocast: bool = False, **options: Any) -> list[Tensor]:
    """What comes out, and the gradient of each tensor."""
    leaves = [
        it.detach().requires_grad_(it.is_floating_point()) if it is not None else None
        for it in tensors
    ]
    kind = leaves[0].device.type if leaves[0] is not None else ""
    with torch.autocast(kind, torch.bfloat16) if autocast else nullcontext():
        result = F.scaled_dot_product_attention(*leaves, **options)
    ramp = torch.arange(result.numel(), dtype=torch.float64).mul_(0.7).sin_()
    wanted = [it for it in leaves if it is not None and it.requires_grad]
    gradients = torch.autograd.grad(result, wanted, ramp.view(result.shape).to(result))
    return [result.detach(), *gradients]


def sliced(*tensors: Tensor | None, **options: Any) -> list[Tensor]:
    assert tensors[0] is not None
    with in_slices(device=tensors[0].device.type) as heads:
        found = results(*tensors, **options)
    assert heads.largest_bytes
    return found


def assert_alike(found: list[Tensor], plain: list[Tensor], tolerance: float) -> None:
    largest = max(it.double().abs().max().item() for it in plain[1:])
    for one, other in zip(found, plain, strict=True):
        assert one.dtype is other.dtype
        assert one.shape == other.shape
        least = other.double().abs().max().item() if one is found[0] else largest
        assert (one.double() - other.double()).abs().max().item() <= tolerance * least


def mask_of(kind: str, shape: tuple[int, ...], keys: int, dtype: torch.dtype) -> Tensor | None:
    *samples, heads, queries = shape
    ones = [1] * len(samples)
    shapes: dict[str, tuple[int, ...]] = {
        "all": (*shape, keys),
        "heads": (*ones, heads, queries, keys),
        "heads alone": (heads, 1, keys),
        "tokens": (queries, keys),
        "padding": (*samples, 1, 1, keys),
    }
    if kind == "none":
        return None
    if kind == "allowed":
        allowed = torch.rand(*samples, 1, queries, keys) > 0.4
        # A query that may see nothing at all.
        allowed[..., 0, :] = False
        return allowed
    return torch.randn(shapes[kind], dtype=torch.float64).to(dtype)


@given(
    samples=st.lists(st.integers(1, 3), max_size=2),
    groups=st.integers(1, 4),
    each=st.integers(1, 5),
    queries=st.integers(1, 9),
    keys=st.integers(1, 9),
    kind=st.sampled_from(
        ["none", "causal", "all", "heads", "heads alone", "tokens", "padding", "allowed"]
    ),
    scale=st.sampled_from([None, 0.7, -0.3]),
    dtype=st.sampled_from(list(TOLERANCES)),
)
def test_numbers(
    samples: list[int],
    groups: int,
    each: int,
    queries: int,
    keys: int,
    kind: str,
    scale: float | None,
    dtype: torch.dtype,
) -> None:
    shape = (*samples, groups * each, queries)
    tensors = made(shape, keys, groups, dtype)
    mask = None if kind == "causal" else mask_of(kind, shape, keys, dtype)
    options = {"is_causal": kind == "causal", "scale": scale, "enable_gqa": each > 1}
    with ordinary(), in_slices() as heads:
        found = results(*tensors, mask, **options)
    assert (heads.largest_bytes > 0) == (groups * each * torch.Size(samples).numel() > 1)
    with ordinary():
        assert_alike(found, results(*tensors, mask, **options), TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("heads", [2, 8, 48])
@pytest.mark.parametrize("causal", [False, True])
def test_bits_on_a_cpu_where_tokens_fill_vectors(
    heads: int, samples: int, dtype: torch.dtype, causal: bool
) -> None:
    tensors = made((samples, heads, 64), 64, heads, dtype)
    with ordinary():
        plain, found = (run(*tensors, is_causal=causal) for run in (results, sliced))
    assert all(map(torch.equal, found, plain))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("groups", [2, 8])
def test_numbers_on_a_gpu(groups: int, dtype: torch.dtype) -> None:
    tensors = made((2, 8, 40), 40, groups, dtype, "cuda")
    with ordinary():
        plain, found = (run(*tensors, enable_gqa=True) for run in (results, sliced))
    assert_alike(found, plain, TOLERANCES[dtype])


def test_autocast_casts_as_for_the_whole() -> None:
    tensors = made((2, 8, 32), 32, 8, torch.float32)
    mask = mask_of("heads", (2, 8, 32), 32, torch.float32)
    plain, found = (run(*tensors, mask, autocast=True) for run in (results, sliced))
    assert found[0].dtype is torch.bfloat16
    assert_alike(found, plain, TOLERANCES[torch.bfloat16])


class Attention(nn.Module):
    def __init__(self, bias: Tensor | None = None) -> None:
        super().__init__()
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, self.bias)


def test_of_the_matrix_there_is_a_slice() -> None:
    heads, tokens = 8, 96
    model, x = Attention(torch.zeros(heads, 1, tokens)), torch.randn(1, heads, tokens, 4)
    matrix = heads * tokens * tokens * 4
    before = observed(model, x.requires_grad_())
    with in_slices():
        after = observed(model, x)
    # Scores, weights, and in backward the gradients of both.
    assert Counter(it.nbytes for it in before.storages)[matrix] >= 4
    assert max(it.nbytes for it in after.storages) == matrix // heads
    living = [
        sum(it.birth <= at < it.death for it in after.storages if it.nbytes == matrix // heads)
        for at in range(len(after.ops))
    ]
    assert max(living) <= 3


@given(
    samples=st.lists(st.integers(1, 4), max_size=2),
    groups=st.integers(1, 40),
    each=st.integers(1, 5),
    nbytes=st.integers(1, 4096),
)
def test_slices_are_of_all_heads_of_all_samples_and_no_more_than_needed(
    samples: list[int], groups: int, each: int, nbytes: int
) -> None:
    heads = groups * each
    cut = slices_of(samples, heads, groups, nbytes)
    assert len(cut) <= headwise._SLICES
    seen = torch.zeros(*samples, heads, 1, 1, dtype=torch.int64)
    for where in cut:
        (part, keys, *_) = where.parts([seen, torch.zeros(*samples, groups, 1, 1), None, None])
        assert part is not None
        assert keys is not None
        assert part.shape[-3] % keys.shape[-3] == 0
        part += 1
    assert bool((seen == 1).all())
    # One slice is left whole where that is small.
    small = nbytes * 2 * torch.Size(samples).numel() <= headwise._LEAST_SLICE
    assert not small or len(cut) == 1


@given(st.integers(1, 2048), st.sampled_from([2, 4, 8]), st.sampled_from([8, 12, 32]))
def test_how_many_slices_stays_with_one_sample_more(tokens: int, samples: int, heads: int) -> None:
    nbytes = heads * tokens * tokens * 4
    counts = {len(slices_of([it], heads, heads, nbytes)) for it in (samples, samples + 1)}
    assert len(counts) == 1


def left(*tensors: Tensor | None, **options: Any) -> None:
    """Plain PyTorch does it, or says what is wrong."""
    try:
        torch.manual_seed(0)
        plain = results(*tensors, **options)
    except (RuntimeError, ValueError) as error:
        with (
            in_slices() as heads,
            pytest.raises(type(error), match=re.escape(str(error).split("\n")[0])),
        ):
            results(*tensors, **options)
    else:
        with in_slices() as heads:
            torch.manual_seed(0)
            found = results(*tensors, **options)
        assert_alike(found, plain, TOLERANCES[torch.float32])
    assert heads.largest_bytes == 0


def test_what_a_fused_kernel_takes_is_left_to_it() -> None:
    query, key, _ = made((2, 4, 16), 16, 4, torch.float32)
    left(query, key, key, is_causal=True)
    left(query, key, key, torch.rand(16, 16) > 0.1)


def test_dropout_is_left_to_plain_pytorch() -> None:
    left(*made((2, 4, 16), 16, 4, torch.float32), dropout_p=0.3)


@ordinary()
def test_so_is_what_is_no_attention_of_equal_heads() -> None:
    query, key, value = made((2, 4, 16), 16, 4, torch.float32)
    for tensors in (
        (query[0, 0], key[0, 0], value[0, 0]),
        (query, key[:1], value[:1]),
        (query, key[:, :1], value[:, :1]),
        (query, key.double(), value),
        (query, key[..., :7], value),
        (query, key, value[..., :9, :]),
        (query, key, value, torch.zeros(16, 9)),
        (query, key, value, torch.zeros(16, 16, dtype=torch.int64)),
        (query, key, value, torch.zeros(1, 1, 2, 4, 16, 16)),
    ):
        left(*tensors)
    left(query, key[:, :3], value[:, :3], enable_gqa=True)
    left(query, key, value, torch.zeros(16, 16), is_causal=True)
    left(query, key, value, torch.zeros(16, 16, dtype=torch.float16))
    # Fewer dimensions than queries have, and heads of nothing.
    left(query, key[0, 0], value[0, 0])
    left(query, key[0, 0, 0], value[0, 0, 0])
    with in_slices() as heads:
        results(query[..., :0], key[..., :0], value)
    assert heads.calls == 0


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_so_are_nested_samples(layout: torch.layout) -> None:
    samples = [torch.randn(tokens, 4, 8) for tokens in (3, 5)]
    nested = torch.nested.nested_tensor(samples, layout=layout).transpose(1, 2)
    if layout is torch.strided:
        nested = nested.contiguous()
    with ordinary(), in_slices() as heads:
        found = F.scaled_dot_product_attention(nested, nested, nested)
    assert heads.largest_bytes == 0
    plain = PLAIN(*[samples[1].transpose(0, 1)] * 3)
    torch.testing.assert_close(found.unbind()[1], plain)


@ordinary()
def test_so_are_small_ones_and_one_head() -> None:
    tensors = made((2, 4, 16), 16, 4, torch.float32)
    matrix = 2 * 4 * 16 * 16 * 4
    with in_slices(matrix + 1) as heads:
        results(*tensors)
    assert heads.largest_bytes == 0
    with in_slices(matrix) as heads:
        results(*tensors)
    assert heads.largest_bytes == matrix
    left(*(it[:1, :1] for it in tensors))


@ordinary()
def test_outside_of_a_pass_attention_is_as_it_was() -> None:
    tensors = made((2, 4, 16), 16, 4, torch.float32)
    with in_slices(open_gate=False) as heads:
        results(*tensors)
    assert heads.largest_bytes == 0
    with in_slices() as heads:
        other = threading.Thread(target=results, args=tensors)
        other.start()
        other.join()
    assert heads.largest_bytes == 0


@ordinary()
def test_calls_of_a_root_without_grad_are_cut() -> None:
    root, other, x = nn.Sequential(Attention()), Attention(), torch.randn(1, 4, 12, 8)
    plain = root(x)
    with in_slices(open_gate=False, roots=[root]) as heads:
        root(x)
        with torch.no_grad():
            other(x)
            assert heads.largest_bytes == 0
            found = root(x)
        assert heads.largest_bytes
    assert torch.allclose(found, plain, rtol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("open_gate", [True, False])
@pytest.mark.parametrize("ours", [True, False])
def test_checkpoints(*, reentrant: bool, open_gate: bool, ours: bool) -> None:
    """Backward calls again, out of the pass, and wants the same saved tensors as before."""
    model, x = Attention(torch.randn(4, 1, 12)), torch.randn(2, 4, 12, 8)

    def gradients() -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        checkpoint(model, leaf, use_reentrant=reentrant).square().sum().backward()
        found = [leaf.grad, model.bias.grad]
        model.bias.grad = None
        return found

    plain = gradients()
    with in_slices(open_gate=open_gate, roots=[nn.Sequential(model)] if ours else []) as heads:
        found = gradients()
    assert heads.calls == (2 if ours else 0)
    assert_alike(found, plain, TOLERANCES[torch.float32])


@ordinary()
def test_gradients_of_gradients_and_several_at_once_are_refused() -> None:
    query, key, value = made((2, 4, 6), 6, 4, torch.float64)
    with in_slices():
        result = F.scaled_dot_product_attention(query.requires_grad_(), key, value)
    with pytest.raises(SectionError, match="create_graph=True"):
        torch.autograd.grad(result.sum(), query, create_graph=True)
    each = torch.ones(2, *result.shape, dtype=torch.float64)
    with pytest.raises(SectionError, match="is_grads_batched=True"):
        torch.autograd.grad(result, query, each, is_grads_batched=True)


@ordinary()
def test_backward_twice_and_tensors_that_are_changed_afterwards() -> None:
    query, key, value = made((2, 4, 6), 6, 4, torch.float64)
    with in_slices():
        leaf = query.clone().requires_grad_()
        moved = leaf * 1
        loss = F.scaled_dot_product_attention(moved, key, value).sum()
    loss.backward(retain_graph=True)
    assert leaf.grad is not None
    once = leaf.grad.clone()
    loss.backward(retain_graph=True)
    assert torch.equal(leaf.grad, 2 * once)
    moved.detach().zero_()
    with pytest.raises(SectionError, match=r"query\.clone\(\)"):
        loss.backward()


class Encoder(nn.TransformerEncoderLayer):
    """Takes a mask that is learnt."""

    def __init__(self, tokens: int) -> None:
        super().__init__(16, 4, 32, dropout=0.0, batch_first=True)
        self.seen = nn.Parameter(torch.randn(tokens, tokens))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, src_mask=self.seen)


class Multihead(nn.MultiheadAttention):
    def __init__(self) -> None:
        super().__init__(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with ordinary():
            return super().forward(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("kind", [Multihead, partial(Encoder, 12)], ids=["multihead", "encoder"])
def test_modules_of_pytorch(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(12, 12, 16)

    def gradients() -> list[Tensor]:
        result = model(x)
        return [result.detach(), *torch.autograd.grad(result.square().sum(), model.parameters())]

    plain = gradients()
    with in_slices() as heads:
        found = gradients()
    assert heads.largest_bytes == 12 * 4 * 12 * 12 * 4
    assert_alike(found, plain, TOLERANCES[torch.float32])


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.bias = nn.Linear(16, 48), nn.Parameter(torch.randn(8, 1, 12))

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, _ = x.shape
        q, k, v = self.mix(x).view(samples, tokens, 3, 8, 2).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, self.bias).transpose(1, 2).flatten(2)


def names(model: nn.Module, x: Tensor) -> Counter[str]:
    trace = static_trace(model, ((x,), {}), CPU)
    return Counter(op.name.split(".")[1] for op in trace.ops)


def test_a_static_trace_shows_what_will_run() -> None:
    x = torch.randn(1, 4, 12, 8)
    with in_slices() as heads:
        others = names(Attention(torch.randn(12, 12)), x)
        with heads.tracing():
            fused = names(Attention(), x.requires_grad_())
            cut = names(Attention(torch.randn(12, 12)), x)
        # Nothing has run.
        assert heads.largest_bytes == heads.calls == 0
    assert others["_safe_softmax"] == 1
    assert fused["_scaled_dot_product_flash_attention_for_cpu"] == 1
    # Each slice, of one head, in forward, and again in backward.
    assert cut["_safe_softmax"] == 8


def test_what_calls_it_may_still_be_cut_along_the_batch() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Projected())
    x = torch.randn(4, 12, 16)
    section = Section(("1",), 2)
    with in_slices() as heads:
        with heads.tracing():
            trace = static_trace_with_batch(model, ((x,), {}), CPU)
        assert reasons(model, section, trace) == ()
        whole = [model(x.requires_grad_()), *torch.autograd.grad(model(x).square().sum(), x)]
        undo = wrap(model, [section])
        cut = [model(x), *torch.autograd.grad(model(x).square().sum(), x)]
        undo()
    assert_alike(cut, whole, TOLERANCES[torch.float32])


@ordinary()
def test_graphs_that_are_written_down_have_plain_attention() -> None:
    tensors = made((2, 4, 6), 6, 4, torch.float32)
    with in_slices() as heads:
        graph = make_fx(lambda *them: F.scaled_dot_product_attention(*them))(*tensors)
        with pytest.raises(TypeError, match="scaled_dot_product_attention"):
            F.scaled_dot_product_attention(*tensors, unknown=1)  # type: ignore[call-overload]
        torch.func.vmap(F.scaled_dot_product_attention)(*tensors)
        assert heads.largest_bytes == 0
    count = sum("_safe_softmax" in str(node.target) for node in graph.graph.nodes)
    assert count == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiler_does_as_ever(backend: str) -> None:
    query, key, value = made((2, 4, 16), 16, 4, torch.float32)
    mask = torch.randn(16, 16, requires_grad=True)
    plain = F.scaled_dot_product_attention(query, key, value, mask)
    with in_slices() as heads:
        compiled = torch.compile(
            lambda *them: F.scaled_dot_product_attention(*them), backend=backend, fullgraph=True
        )
        found = compiled(query, key, value, mask)
    assert heads.largest_bytes == 0
    assert torch.equal(found, plain)
