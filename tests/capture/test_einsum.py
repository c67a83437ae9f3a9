"""Einsums give the same results as matrix products, and the same graphs as ``@``."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmc_lsp.capture.worker.passes.einsum import einsum_with_fallback
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import ActionKind
from tests.codegen.harness import compile_errors, fused, verified
from tests.planning.situations import H200, fully_fused, proposed, start


def fallback(equation: str, operands: object, *, path: object = None) -> str:
    """The fallback."""
    return "fallback"


MATRIX_PRODUCTS = [
    "ij,jk->ik",
    "bhid,bhjd->bhij",
    "bihd,bjhd->bhij",
    "b h i j , b h j d -> b i h d",
    "...id,...jd->...ij",
    "bsd,dhe->bshe",
    "bshd,hdo->bso",
    "bijl,lk->bijk",
    "ij,kj->ki",
]
NOT_MATRIX_PRODUCTS = [
    "ii,ij->ij",
    "ij,ij->ij",
    "ij,jk",
    "i,j->ij",
    "ij,j->i",
    "aij,bjk->abik,",
    "bshd,dho->bso",
    "...ij,jk->ik",
    "ij,jk->i",
]


def operands_of(equation: str, sizes: dict[str, int]) -> list[torch.Tensor]:
    texts = equation.replace(" ", "").partition("->")[0].split(",")[:2]
    return [torch.randn([sizes[c] for c in text.replace("...", "xy")], dtype=torch.float64) for text in texts]


@pytest.mark.parametrize("equation", MATRIX_PRODUCTS)
def test_an_einsum_runs_as_a_matrix_product(equation: str) -> None:
    operands = operands_of(equation, {c: 2 + i % 5 for i, c in enumerate("abcdefghijklmnopqrstuvwxyz")})
    found = einsum_with_fallback(fallback)(equation, operands)
    torch.testing.assert_close(found, torch.einsum(equation, *operands))


@pytest.mark.parametrize("equation", NOT_MATRIX_PRODUCTS)
def test_an_einsum_that_is_no_matrix_product_uses_the_fallback(equation: str) -> None:
    operands = operands_of(equation, dict.fromkeys("abcdefghijklmnopqrstuvwxyz", 3))
    assert einsum_with_fallback(fallback)(equation, operands) == "fallback"


def test_a_broadcast_axis_uses_the_fallback() -> None:
    assert einsum_with_fallback(fallback)("ij,jk->ik", [torch.randn(3, 1), torch.randn(4, 5)]) == "fallback"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_random_einsums_equal_those_of_pytorch(data: st.DataObject) -> None:
    letters = st.lists(st.sampled_from("abcde"), max_size=4, unique=True)
    left, right = data.draw(letters), data.draw(letters)
    out = data.draw(st.permutations(sorted({*left, *right})))
    out = out[: data.draw(st.integers(0, len(out)))]
    equation = f"{''.join(left)},{''.join(right)}->{''.join(out)}"
    operands = operands_of(equation, {c: 2 + i for i, c in enumerate("abcde")})
    found = einsum_with_fallback(lambda equation, operands, *, path: torch.einsum(equation, *operands))(
        equation, operands
    )
    torch.testing.assert_close(found, torch.einsum(equation, *operands))


@pytest.mark.parametrize(
    ("scores", "mixed"), [("bhid,bhjd->bhij", "bhij,bhjd->bhid"), ("bihd,bjhd->bhij", "bhij,bjhd->bihd")]
)
def test_an_attention_with_einsums_is_one_kernel_for_all_sizes(scores: str, mixed: str, captured) -> None:
    text = f"""import torch
# mtmc: q=f16[B,H,S,D] k=f16[B,H,S,D] v=f16[B,H,S,D] B=2 H=3 S=40 D=16
def f(q, k, v):
    s = torch.einsum("{scores}", q, k) * 0.25
    return torch.einsum("{mixed}", s.softmax(-1), v)
"""
    capture = captured(text, "f")
    assert {capture.graph.inputs[0].type.shape[i].is_symbol for i in range(4)} == {True}
    [action, *_] = list(proposed(capture, start(capture, text), ActionKind.FUSE, device=H200))
    candidate = BuiltinCoder().write(capture, start(capture, text), action)
    assert len(candidate.launches) == 1
    assert verified(capture, candidate).reason == ""


@pytest.mark.parametrize("sizes", ["M K N", "m k n", "rows cols start"])
def test_size_names_do_not_clash_with_names_in_the_kernel(sizes: str, captured) -> None:
    """The rows of the product combine two of these sizes, and the columns are a third: none is the kernel's variable."""
    m, k, n = sizes.split()
    text = f"""import torch
# mtmc: a=f32[{m},{k}] b=f32[{k},{n}] {m}=12 {k}=20 {n}=9
def f(a, b):
    return torch.einsum("ij,jk,lj->ilk", a, b, a) * 2
"""
    capture = captured(text, "f")
    assert verified(capture, fully_fused(capture, start(capture, text))).reason == ""


@pytest.mark.parametrize(
    ("inputs", "equation"),
    [
        ("a=f32[M,K] b=f32[M,K] M=12 K=20", "ij,ij->i"),
        ("a=f32[B,M,K] b=f32[B,K,1] B=3 M=12 K=20", "bij,bjk->bik"),
        ("a=f32[B,1,K] b=f32[B,K,N] B=3 K=20 N=12", "bij,bjk->bik"),
    ],
)
def test_a_product_can_have_a_single_row_or_column(inputs: str, equation: str, captured) -> None:
    text = f"""import torch
# mtmc: {inputs}
def f(a, b):
    return torch.relu(torch.einsum("{equation}", a, b)) + 1
"""
    capture = captured(text, "f")
    product = next(node.name for node in capture.graph.nodes if node.word in ("bmm", "matmul"))
    tile = {"block_m": 16, "block_n": 16, "block_k": 16, "group_m": 4, "warps": 4, "stages": 2}
    candidate = fused(capture, text, {**tile, "precision": "ieee"}, [product])
    assert verified(capture, candidate).reason == ""
    assert compile_errors(capture, candidate, ["sm_90"]) == []


@pytest.mark.parametrize("equation", ["ij,jk->ki", "ij,jk,lj->ilk"])
def test_a_reduction_of_length_one_runs_the_original_code(equation: str, captured) -> None:
    operands = "a, b, a" if equation.count(",") == 2 else "a, b"
    text = f"""import torch
# mtmc: a=f32[M,K] b=f32[K,N] M=12 K=20 N=9
def f(a, b):
    return torch.einsum("{equation}", {operands}) * 2
"""
    assert captured(text, "f").graph.conditions == ("K >= 2",)
