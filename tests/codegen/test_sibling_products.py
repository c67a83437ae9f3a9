"""Products with one left operand (gate and up; queries, keys and values) as one kernel, which loads that operand once."""

from __future__ import annotations

import pytest

from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.ir.regions import CannotFuse, products_in
from mtmc_lsp.schedule.configs import MatmulConfig
from mtmc_lsp.tuning.waves import stream_programs
from tests.codegen.checker import Checker, start
from tests.codegen.harness import compile_errors, fused, some_cases
from tests.planning.situations import H200, proposed, region_and_program

TEXT = """import torch
import torch.nn.functional as F


# mtmc: {arguments} B={rows}
def f({names}):
    return {result}
"""
TILE = {
    "block_m": 16, "block_n": 32, "block_k": 32, "group_m": 4, "warps": 4, "stages": 2, "precision": "native",
}  # fmt: skip


def products(result: str, rows: int = 20, **shapes: str) -> str:
    arguments = " ".join(f"{name}={shape}" for name, shape in shapes.items())
    return TEXT.format(arguments=arguments, names=", ".join(shapes), result=result, rows=rows)


SIBLINGS = {
    "gate and up": products("F.silu(F.linear(x, g)) * F.linear(x, u)", x="f16[B,72]", g="f16[56,72]", u="f16[56,72]"),
    "biases and a batch": products(
        "F.gelu(F.linear(x, g, a)) * F.linear(x, u, b)",
        x="f16[B,9,72]", g="f16[56,72]", u="f16[56,72]", a="f16[56]", b="f16[56]",
    ),
    "queries, keys and values": products(
        "x @ q, x @ k, x @ v", x="f16[B,9,72]", q="f16[72,48]", k="f16[72,48]", v="f16[72,48]"
    ),
    "heads of one and rows of another": products(
        "F.linear(x, q).view(-1, 9, 4, 12).transpose(1, 2), F.linear(x, k)", x="f16[B,9,72]", q="f16[48,72]", k="f16[48,72]"
    ),
    "matrices of a batch": products("torch.relu(x @ g) + torch.bmm(x, u)", x="f16[3,B,40]", g="f16[3,40,24]", u="f16[3,40,24]"),
    "a computed left operand": products("(x * 2).tanh() @ g + torch.sin((x * 2).tanh() @ u)",
                                        x="f16[B,72]", g="f16[72,40]", u="f16[72,40]"),
    "weights of 8 bits with scales": products(
        "F.silu(F.linear(x, g.to(x.dtype) * s[:, None])) * F.linear(x, u.to(x.dtype) * t[:, None])",
        x="f16[B,72]", g="i8[56,72]@-127..127", u="i8[56,72]@-127..127", s="f16[56]@0.001..0.01", t="f16[56]@0.001..0.01",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SIBLINGS)
def test_products_with_one_left_operand_are_one_kernel(checker: Checker, name: str) -> None:
    capture = checker.capture(SIBLINGS[name])
    candidate = fused(capture, SIBLINGS[name], TILE)
    assert candidate.source.count("tl.load(x_ptr") == 1
    assert len(candidate.launches) == 1
    assert checker.first_failure(capture, candidate, some_cases(capture)) == ""


@pytest.mark.parametrize("name", ["gate and up", "queries, keys and values"])
def test_operands_of_several_products_are_loaded_by_descriptors(checker: Checker, name: str) -> None:
    capture = checker.capture(SIBLINGS[name])
    candidate = fused(capture, SIBLINGS[name], {**TILE, "tma": True})
    count = len(products_in(*region_and_program(capture)))
    assert candidate.source.count("tl.make_tensor_descriptor") == 1 + count
    assert checker.first_failure(capture, candidate, some_cases(capture)) == ""
    assert compile_errors(capture, candidate, ["sm_90"]) == []


SEPARATE = {
    "float32": products("torch.relu(x @ g) * (x @ u)", x="f32[B,72]", g="f32[72,40]", u="f32[72,40]"),
    "other left operands": products("(x @ g) * (y @ u)", x="f16[B,72]", y="f16[B,72]", g="f16[72,40]", u="f16[72,40]"),
    "one after another": products("(x @ g) * (x @ (x @ g))", rows=40, x="f16[B,B]", g="f16[B,B]"),
    "other sizes": products("x @ g, x @ u", x="f16[B,72]", g="f16[72,40]", u="f16[72,24]"),
    "four": products("(x @ g) * (x @ h) * (x @ i) * (x @ j)", x="f16[B,72]", g="f16[72,40]", h="f16[72,40]", i="f16[72,40]", j="f16[72,40]"),
}  # fmt: skip


@pytest.mark.parametrize("name", SEPARATE)
def test_other_products_stay_separate_kernels(checker: Checker, name: str) -> None:
    capture = checker.capture(SEPARATE[name])
    reason = "operation after the product" if name == "one after another" else "two matrix products"
    with pytest.raises(CannotFuse, match=reason):
        region_and_program(capture)


@pytest.mark.parametrize("field", ["split_k", "stream_k"])
def test_sums_of_several_products_are_not_split(checker: Checker, field: str) -> None:
    text = SIBLINGS["gate and up"]
    capture = checker.capture(text)
    with pytest.raises(CannotCode, match=f"{field} cannot be 2: the kernel computes 2 products"):
        fused(capture, text, {**TILE, field: 2})


def test_the_planner_proposes_one_kernel_with_a_tile_for_two_accumulators(checker: Checker) -> None:
    text = products(
        "F.silu(F.linear(x, g)) * F.linear(x, u)", rows=256, x="f16[B,1024]", g="f16[2816,1024]", u="f16[2816,1024]"
    )
    capture = checker.capture(text)
    (action,) = proposed(capture, start(capture), ActionKind.FUSE, device=H200)
    assert set(action.region) == {node.name for node in capture.graph.nodes}
    config = action.params["config"]
    assert isinstance(config, dict)
    assert 2 * config["block_m"] * config["block_n"] <= 128 * 256
    candidate = fused(capture, text, config)
    (report,) = checker.reports(capture, candidate)
    assert (report.error, report.spills) == ("", 0)


def test_the_planner_adds_products_that_share_only_their_input(checker: Checker) -> None:
    text = products(
        "x @ q, x @ k, x @ v", rows=2, x="f16[B,128,512]", q="f16[512,512]", k="f16[512,512]", v="f16[512,512]"
    )
    capture = checker.capture(text)
    (action,) = proposed(capture, start(capture), ActionKind.FUSE, device=H200)
    assert len(action.region) == 3
    ir, region = region_and_program(capture)
    assert stream_programs(ir, region, from_json(MatmulConfig, action.params["config"]), H200) == []


def halves(body: str, rows: int = 20, **shapes: str) -> str:
    return products("None", rows, **shapes).replace(
        "    return None", "\n".join(f"    {line}" for line in body.splitlines())
    )


HALVES = {
    "chunks": halves("g, u = (x @ w).chunk(2, dim=-1)\nreturn F.silu(g) * u", x="f16[B,72]", w="f16[72,80]"),
    "a bias, the second half first": halves(
        "y, gate = F.linear(x, w, b).split(40, -1)\nreturn F.gelu(gate) * y",
        x="f16[B,3,72]", w="f16[80,72]", b="f16[80]",
    ),
    "glu": halves("return F.glu(F.linear(x, w, b), dim=-1) + 1", x="f16[B,3,72]", w="f16[80,72]", b="f16[80]"),
    "slices": halves("y = x @ w\nreturn torch.sigmoid(y[..., :40]) * y[..., 40:]", x="f16[B,72]", w="f16[72,80]"),
    "heads": halves(
        "k, v = F.linear(x, w).chunk(2, -1)\nreturn (k.view(-1, 3, 4, 10) * 2 + v.view(-1, 3, 4, 10)).transpose(1, 2)",
        x="f16[B,3,72]", w="f16[80,72]",
    ),
    "matrices of a batch": halves("g, u = torch.bmm(x, w).chunk(2, -1)\nreturn g * u", x="f16[3,B,40]", w="f16[3,40,48]"),
    "packed weights": halves(
        "q = torch.stack([w & 15, w >> 4], -1).view(80, 64).to(x.dtype) - 8\n"
        "g, u = F.linear(x, q * s[:, None]).chunk(2, -1)\nreturn F.silu(g) * u",
        x="f16[B,64]", w="u8[80,32]@0..255", s="f16[80]@0.001..0.01",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tma"), [*((name, False) for name in HALVES), ("a bias, the second half first", True)]
)
def test_halves_of_a_products_columns_are_combined_in_its_kernel(checker: Checker, name: str, tma: bool) -> None:
    capture = checker.capture(HALVES[name])
    candidate = fused(capture, HALVES[name], {**TILE, "tma": tma})
    assert len(candidate.launches) == 1
    assert "acc_2 = tl.dot(" in candidate.source
    assert checker.first_failure(capture, candidate, some_cases(capture)) == ""
    assert checker.compile_errors(capture, candidate) == []


WHOLE = {
    "one half": halves("return F.silu((x @ w)[:, :40])", x="f16[B,72]", w="f16[72,80]"),
    "the product itself": halves("y = x @ w\ng, u = y.chunk(2, -1)\nreturn g * u, y", x="f16[B,72]", w="f16[72,80]"),
    "unequal parts": halves("g, u = (x @ w).split([30, 50], -1)\nreturn g[:, :30] * u[:, :30]", x="f16[B,72]", w="f16[72,80]"),
    "rows": halves("g, u = (x @ w).chunk(2, 0)\nreturn g * u", x="f16[B,72]", w="f16[72,80]"),
    "float32": halves("g, u = (x @ w).chunk(2, -1)\nreturn g * u", x="f32[B,72]", w="f32[72,80]"),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_other_parts_of_a_product_are_read_from_memory(checker: Checker, name: str) -> None:
    capture = checker.capture(WHOLE[name])
    with pytest.raises(CannotFuse):
        region_and_program(capture)


def test_the_planner_combines_the_halves_of_a_product(checker: Checker) -> None:
    text = halves(
        "g, u = F.linear(x, w).chunk(2, -1)\nreturn F.silu(g) * u", rows=64, x="f16[B,1024]", w="f16[5632,1024]"
    )
    capture = checker.capture(text)
    (action,) = proposed(capture, start(capture), ActionKind.FUSE, device=H200)
    assert set(action.region) == {node.name for node in capture.graph.nodes}
    with pytest.raises(CannotCode, match="split_k cannot be 2: the kernel computes 2 products"):
        fused(capture, text, {**TILE, "split_k": 2})
