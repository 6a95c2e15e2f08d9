"""With which of its neighbours a compiler makes one kernel of an op."""

from __future__ import annotations

import pytest

from belady.graph.ops import fusion_of
from belady.ir.ops import Fusion


@pytest.mark.parametrize(
    ("name", "fusion"),
    [
        ("aten.relu.default", Fusion.AROUND),
        ("aten.add.Tensor", Fusion.AROUND),
        ("aten.gelu.default", Fusion.AROUND),
        ("aten._to_copy.default", Fusion.AROUND),
        ("aten.hardswish.default", Fusion.AROUND),
        ("aten._native_batch_norm_legit_functional.default", Fusion.AFTER),
        ("aten.native_layer_norm.default", Fusion.AFTER),
        ("aten.native_layer_norm_backward.default", Fusion.NONE),
        ("aten.cudnn_batch_norm.default", Fusion.NONE),
        ("aten.convolution.default", Fusion.NONE),
        ("aten.mm.default", Fusion.NONE),
        ("aten.sum.dim_IntList", Fusion.NONE),
        ("aten.max_pool2d_with_indices.default", Fusion.NONE),
        ("belady.max_pool.default", Fusion.NONE),
        ("aten.none_such.default", Fusion.NONE),
        ("another.relu.default", Fusion.NONE),
        ("outside", Fusion.NONE),
    ],
)
def test_what_is_surely_fused(name: str, fusion: Fusion) -> None:
    assert fusion_of(name) is fusion
