"""Products of float8 operands, by ``torch._scaled_mm`` or written out: kernels multiply them as float16 numbers, without rounding."""

from __future__ import annotations

import pytest

from mtmc_lsp.ir.lower import lower
from mtmc_lsp.ir.primitives import PrimOp
from mtmc_lsp.verify.cases import Case
from tests.codegen.checker import Checker
from tests.codegen.harness import fused, some_cases
from tests.versions import needs_scales_of_rows

TILE = {
    "block_m": 16, "block_n": 32, "block_k": 32, "group_m": 4, "warps": 4, "stages": 2, "precision": "native",
}  # fmt: skip
SCALAR, ROWS, COLUMNS = "f32[]@0.01..0.1", "f32[B,1]@0.01..0.1", "f32[1,48]@0.01..0.1"
CALL = "torch._scaled_mm(x, w.t(), scale_a=s, scale_b=t, out_dtype=torch.bfloat16)"


def text(body: str, s: str = SCALAR, t: str = SCALAR, x: str = "f8e4m3[B,64]", w: str = "f8e4m3[48,64]") -> str:
    arguments = f"x={x} w={w} s={s} t={t} bias=bf16[48] B=16"
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return f"import torch\n\n\n# mtmc: {arguments}\ndef f(x, w, s, t, bias):\n{lines}\n"


PRODUCTS = {
    "scales of tensors": text(f"return torch.relu({CALL}) + bias"),
    "scales of rows and columns": text(f"return {CALL} * 2", ROWS, COLUMNS),
    "a bias, and a float32 result": text(
        "y = torch._scaled_mm(x, w.t(), s, t, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True)\nreturn y.float()"
    ),
    "operands that the kernel quantises": text(
        "s = (x.abs().amax(-1, keepdim=True).float() / 448).clamp(min=1e-12)\n"
        "x = (x.float() / s).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)\n"
        f"return {CALL}",
        ROWS, COLUMNS, x="bf16[B,64]",
    ),
    "written out": text(
        "x = (x.float() / s).clamp(-448, 448).to(torch.float8_e4m3fn)\n"
        "return ((x.float() @ w.float().t()) * s * t).to(torch.bfloat16)",
        ROWS, COLUMNS, x="bf16[B,64]",
    ),
    "two kinds of float8": text(
        "return torch.nn.functional.linear(x.float(), w.float()).mul(s * t).bfloat16()", w="f8e5m2[48,64]"
    ),
}  # fmt: skip

PARAMETERS = [
    pytest.param(name, marks=needs_scales_of_rows) if CALL in source and ROWS in source else name
    for name, source in PRODUCTS.items()
]


def operand_dtypes(checker: Checker, source: str) -> set[str]:
    ir = lower(checker.capture(source).graph)
    products = [prim for prim in ir.prims.values() if prim.op is PrimOp.MATMUL]
    assert products
    return {ir.prims[name].dtype for prim in products for name in prim.inputs}


@pytest.mark.parametrize("name", PARAMETERS)
def test_kernels_multiply_float8_operands(checker: Checker, name: str) -> None:
    source = PRODUCTS[name]
    capture = checker.capture(source)
    assert operand_dtypes(checker, source) == {"float16"}
    nodes = [node.name for node in capture.graph.nodes]
    if "quantises" in name:
        # A reduction of the operand is a kernel before.
        ir = lower(capture.graph)
        nodes = nodes[next(i for i, node in enumerate(nodes) if ir.product_of_node(node)) :]
    candidate = fused(capture, source, TILE, nodes)
    assert len(candidate.launches) == 1
    assert checker.first_failure(capture, candidate, some_cases(capture)) == ""
    assert checker.compile_errors(capture, candidate) == []


@pytest.mark.parametrize(
    ("body", "dtypes"),
    [
        ("return (x.float() @ w.float().t()).bfloat16()", {"bfloat16"}),
        ("return torch.nn.functional.linear(x.float(), w.float()).softmax(-1).to(x.dtype)", {"bfloat16"}),
        ("return x.float() @ w.float().t()", {"float32"}),
        ("y = x.float() @ w.float().t()\nreturn y.bfloat16(), y.sum(-1)", {"float32"}),
        ("return ((x.float() * 2) @ w.float().t()).bfloat16()", {"float32"}),
    ],
)
def test_products_of_widened_operands_are_narrow_if_their_results_are(
    checker: Checker, body: str, dtypes: set[str]
) -> None:
    assert operand_dtypes(checker, text(body, x="bf16[B,64]", w="bf16[48,64]")) == dtypes


@pytest.mark.parametrize(
    "name", [pytest.param("scales of rows and columns", marks=needs_scales_of_rows), "written out"]
)
def test_kernels_keep_nan(checker: Checker, name: str) -> None:
    source = PRODUCTS[name]
    capture = checker.capture(source)
    candidate = fused(capture, source, TILE)
    case = Case({"B": 16}, "nan", 3)
    assert checker.failures(capture, [candidate], case) == [""]


def test_float16_and_bfloat16_have_no_common_dtype(checker: Checker) -> None:
    source = text("return (x.float() @ w.float().t()).bfloat16()", x="bf16[B,64]", w="f16[48,64]")
    assert operand_dtypes(checker, source) == {"float32"}
