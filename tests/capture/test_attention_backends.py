"""The graph of a trained attention fixes PyTorch's choice of a backend, so its sizes are those that this backend takes."""

from __future__ import annotations

import pytest

from mtmc_lsp.capture.worker.size_branches import long_enough_for_cudnn
from mtmc_lsp.core.graph import Graph, GraphInput, InputKind, Node, Ref, TensorType, contiguous_stride
from mtmc_lsp.core.sizes import Size


def attention(backend: str, queries: str, keys: str) -> Graph:
    shapes = [tuple(map(Size.parse, ("B", "8", length, "64"))) for length in (queries, keys, keys)]
    kinds = [TensorType(shape, "bfloat16", contiguous_stride(shape)) for shape in shapes]
    inputs = [GraphInput(name, name, InputKind.ARGUMENT, kind) for name, kind in zip("qkv", kinds, strict=True)]
    node = Node("attention", f"aten.{backend}.default", tuple(Ref(item.name) for item in inputs), {}, (kinds[0],))
    return Graph(tuple(inputs), (node,), (Ref("attention"),), "tensor", {"B": 2, "S": 128, "T": 64})


@pytest.mark.parametrize(
    ("queries", "keys", "conditions"),
    [("S", "S", ("S > 1",)), ("S", "T", ("S > 1", "T > 1")), ("128", "T + 1", ("T + 1 > 1",)), ("128", "64", ())],
)
def test_cudnn_takes_more_than_one_query_and_key(queries: str, keys: str, conditions: tuple[str, ...]) -> None:
    assert long_enough_for_cudnn(attention("_scaled_dot_product_cudnn_attention", queries, keys)) == conditions


def test_other_backends_take_any_length() -> None:
    assert long_enough_for_cudnn(attention("_scaled_dot_product_flash_attention", "S", "S")) == ()
