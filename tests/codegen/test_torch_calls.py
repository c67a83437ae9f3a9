"""Torch calls in launchers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtmc_lsp.codegen.module.torch_calls import PLAIN, torch_call
from mtmc_lsp.core.graph import Node, Ref
from mtmc_lsp.core.sizes import Size


def called(op: str, *args: object) -> str:
    return torch_call(Node("y", op, (Ref("x"), *args), {}, ()), {Ref("x"): "x"}, {}, "x")  # type: ignore[arg-type]


def test_a_view_accepts_the_strides_that_a_library_call_returns() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4).transpose(0, 1)
    text = called("aten.view.default", (6, 4))
    assert torch.equal(eval(text, {"x": x}), x.reshape(6, 4))


def test_a_view_as_another_dtype_stays_a_view() -> None:
    x = torch.arange(24.0)
    assert torch.equal(eval(called("aten.view.dtype", "int32"), {"x": x, "torch": torch}), x.view(torch.int32))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((1, 0, 2), "x[:, :2]"),
        ((0, 1, 2**63 - 1), "x[1:]"),
        ((2, 1), "x[:, :, 1:]"),
        ((1, -2, -1), "x[:, -2:-1]"),
        ((), "x[:]"),
        ((-1, 0, 3), "torch.ops.aten.slice.Tensor(x, -1, 0, 3)"),
        ((2, 0, 4, 2), "torch.ops.aten.slice.Tensor(x, 2, 0, 4, 2)"),
    ],
)
def test_a_slice_is_an_index(arguments: tuple[int, ...], text: str) -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    assert called("aten.slice.Tensor", *arguments) == text
    assert torch.equal(eval(text, {"x": x, "torch": torch}), torch.ops.aten.slice.Tensor(x, *arguments))


def test_a_slice_with_sizes_has_spaces_around_its_colon() -> None:
    end = Size.symbol("X") + 128
    node = Node("y", "aten.slice.Tensor", (Ref("x"), 1, Size.symbol("X"), end), {}, ())
    assert torch_call(node, {Ref("x"): "x"}, {"X": "X"}, "x") == "x[:, X : X + 128]"


X, Y, Z = Ref("x"), Ref("y"), Ref("z")
AT, N, M = Ref("at"), Ref("n"), Ref("m")
IMAGE, WEIGHT, BIAS = Ref("image"), Ref("weight"), Ref("bias")
TENSORS = {
    "x": torch.linspace(-2.0, 2.0, 12).reshape(3, 4).t(),
    "y": torch.linspace(0.5, 0.9, 12).reshape(4, 3),
    "z": torch.linspace(-1.0, 3.0, 4)[:, None],
    "at": torch.tensor([[0, 1, 2], [3, 0, 1]]),
    "n": torch.arange(-6, 6).reshape(4, 3),
    "image": torch.linspace(-1.0, 1.0, 240).reshape(2, 4, 5, 6),
    "weight": torch.linspace(-0.3, 0.2, 48).reshape(4, 2, 3, 2),
    "bias": torch.linspace(-1.0, 1.0, 4),
    "m": torch.arange(12).reshape(4, 3) % 5 > 1,
}
ELEMENTWISE = (
    "abs acos asin atan bitwise_not ceil cos cosh erf erfc exp2 expm1 floor isinf isnan log log10 log1p log2 logical_not neg "
    "reciprocal round rsqrt sign sin sinh sqrt tan trunc"
)
OF_TWO = "add div eq fmod ge gt le lt mul ne remainder rsub sub"
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    *((f"aten.{name}.default", (N if name == "bitwise_not" else Y,), {}) for name in ELEMENTWISE.split()),
    *((f"aten.{name}.Tensor", (N, Y), {}) for name in OF_TWO.split()),
    *((f"aten.{name}.Tensor", (Y, Z), {}) for name in OF_TWO.split()),
    *((f"aten.{name}.Scalar", (N, 2), {}) for name in OF_TWO.split()),
    *((f"aten.{name}.Scalar", (N, 2.5), {}) for name in OF_TWO.split()),
    *((f"aten.{name}.default", (X, Z), {}) for name in ("atan2", "maximum", "minimum")),
    *((f"aten.bitwise_{name}.Tensor", (N, M), {}) for name in ("and", "or", "xor")),
    *((f"aten.logical_{name}.default", (N, M), {}) for name in ("and", "or", "xor")),
    *((f"aten.{name}.default", (X, Y, Z), {"value": 0.5}) for name in ("addcdiv", "addcmul")),
    *((f"aten.{name}.dim", (X, 1, True), {}) for name in ("all", "any")),
    *((f"aten.{name}.default", (X, -1, True), {}) for name in ("argmax", "argmin")),
    *((f"aten.{name}.default", ((2, 3),), {"dtype": "float16"}) for name in ("ones", "zeros")),
    *((f"aten.{name}.default", (X,), {"dtype": "float64"}) for name in ("ones_like", "zeros_like")),
    ("aten.add.Tensor", (X, Y), {"alpha": 2}),
    ("aten.div.Tensor_mode", (N, Z), {"rounding_mode": "floor"}),
    ("aten.pow.Scalar", (2.0, X), {}),
    ("aten.pow.Tensor_Scalar", (N, 2), {}),
    ("aten.pow.Tensor_Tensor", (Y, Z), {}),
    ("aten.clamp.default", (X, None, 1), {}),
    ("aten.clamp.Tensor", (X, Z), {}),
    ("aten.clamp_max.default", (X, 0.5), {}),
    ("aten.clamp_min.default", (N, 1), {}),
    ("aten.masked_fill.Scalar", (X, M, 0), {}),
    ("aten.round.decimals", (X,), {"decimals": 1}),
    ("aten.logsumexp.default", (X, (1,), True), {}),
    ("aten.linalg_vector_norm.default", (X, 2.0, (-1,), True), {}),
    ("aten.prod.default", (N,), {"dtype": "float32"}),
    ("aten.prod.dim_int", (X, 0, True), {}),
    ("aten.sum.dim_IntList", (M, (0,), True), {"dtype": "float32"}),
    ("aten.var_mean.correction", (X, (1,)), {"correction": 0, "keepdim": True}),
    ("aten.embedding.default", (X, AT), {}),
    ("aten.embedding.default", (X, AT, 0), {}),
    ("aten.roll.default", (X, (1,), (0,)), {}),
    ("aten.scatter.src", (X, 0, AT, Y), {}),
    ("aten.scatter.value", (X, 0, AT, 7), {}),
    ("aten.scatter_add.default", (Y, 0, AT, X), {}),
    ("aten.select.int", (X, 1, 2), {}),
    ("aten.clone.default", (X,), {}),
    ("aten.clone.default", (X,), {"memory_format": "torch.contiguous_format"}),
    ("aten.convolution.default", (IMAGE, WEIGHT, None, (2, 1), (1, 0), (1, 1), False, (0, 0), 2), {}),
    ("aten.convolution.default", (IMAGE, WEIGHT, BIAS, (2, 1), (1, 0), (1, 1), True, (1, 0), 2), {}),
    ("aten.native_group_norm.default", (IMAGE, None, None, 2, 4, 30, 2, 1e-5), {}),
    ("aten.native_layer_norm.default", (Y, (3,), None, None, 1e-3), {}),
    ("aten.hardtanh.default", (X, -1.0, 0.5), {}),
    ("aten.pad.default", (X, (1, 0, 0, 2)), {}),
    ("aten.pad.default", (IMAGE, (1, 0, 0, 2), "reflect"), {}),
    ("aten.adaptive_avg_pool2d.default", (IMAGE, (2, 3)), {}),
    ("aten.arange.default", (4,), {}),
    ("aten.arange.default", (2.5,), {}),
    ("aten.arange.start_step", (1, 9, 2), {"dtype": "int32", "device": "cpu"}),
    ("aten.full.default", ((2, 3), 2), {"dtype": "float32", "pin_memory": False}),
    ("aten.full.default", ((2, 3), 2), {}),
    ("aten.full_like.default", (X, 1), {"pin_memory": False}),
    ("aten.scalar_tensor.default", (0.0,), {"dtype": "float64"}),
    ("aten.scalar_tensor.default", (1,), {}),
    ("aten._to_copy.default", (X,), {"dtype": "float16"}),
    ("aten._to_copy.default", (X,), {"dtype": "float32"}),
]


@pytest.mark.parametrize(("op", "arguments", "named"), CALLS, ids=[f"{i} {op[5:]}" for i, (op, *_) in enumerate(CALLS)])
def test_a_readable_call_does_what_the_operation_of_aten_does(
    op: str, arguments: tuple[Any, ...], named: dict[str, Any]
) -> None:
    names = {Ref(name): name for name in TENSORS}
    text = torch_call(Node("out", op, arguments, named, ()), names, {}, "x")
    assert not text.startswith("torch.ops.")
    result = eval(text, {"torch": torch, **TENSORS})
    _, name, overload = op.split(".")
    values = [TENSORS[item.name] if isinstance(item, Ref) else item for item in arguments]
    parsed = ("dtype", "memory_format")
    kinds = {key: getattr(torch, value.split(".")[-1]) if key in parsed else value for key, value in named.items()}
    expected = getattr(getattr(torch.ops.aten, name), overload)(*values, **kinds)
    pairs = zip(result, expected, strict=True) if isinstance(expected, tuple) else [(result, expected)]
    for one, other in pairs:
        assert one.dtype == other.dtype and one.stride() == other.stride()
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
        inputs = {tensor.data_ptr() for tensor in TENSORS.values()}
        assert (one.data_ptr() in inputs) == (other.data_ptr() in inputs)


def test_each_elementwise_operation_is_compared_with_atens() -> None:
    assert set(ELEMENTWISE.split()) | set(OF_TWO.split()) <= PLAIN


def test_a_number_is_converted_to_a_tensor() -> None:
    """In a loop over a table, constants stay numbers in its graph."""
    text = torch_call(Node("y", "aten._to_copy.default", (1,), {"dtype": "float32"}, ()), {}, {}, "x")
    result = eval(text, {"torch": torch})
    assert result.dtype == torch.float32 and result.item() == 1.0
