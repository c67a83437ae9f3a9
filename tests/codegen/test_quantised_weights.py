"""Linear layers with weights of 8, 4 and 2 bits, as people write them: one kernel converts the weights in registers."""

from __future__ import annotations

import pytest

from mtmc_lsp.core.workload import Capture
from mtmc_lsp.fusion.search import FusionSearch
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.schedule.schedule import Schedule
from tests.codegen.checker import Checker
from tests.codegen.harness import fused, some_cases
from tests.planning.situations import H200

TEXT = """import torch
import torch.nn.functional as F


# mtmc: {arguments}
def f({names}):
{body}
"""
TILE = {
    "block_m": 16, "block_n": 32, "block_k": 32, "group_m": 4, "warps": 4, "stages": 2, "precision": "native",
}  # fmt: skip


def layer(body: str, **shapes: str) -> str:
    sizes = shapes.pop("sizes", "B=5")
    arguments = " ".join(f"{name}={shape}" for name, shape in shapes.items())
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return TEXT.format(arguments=f"{arguments} {sizes}", names=", ".join(shapes), body=lines)


X, S = "f16[B,192]", "f16[40]@0.001..0.01"
PACKED = {
    "nibbles, one scale per row": layer(
        "q = torch.stack([w & 0xF, w >> 4], dim=-1).view(40, 192)\n"
        "return x @ ((q.to(x.dtype) - 8) * s[:, None]).T",
        x=X, w="u8[40,96]@0..255", s=S,
    ),
    "nibbles, scales and zero points per group": layer(
        "q = torch.stack([w & 0xF, w >> 4], dim=-1).reshape(w.shape[0], -1, 64).to(x.dtype)\n"
        "return F.silu(F.linear(x, ((q - z[:, :, None]) * s[:, :, None]).reshape(w.shape[0], -1), b))",
        x=X, w="u8[40,96]@0..255", s="f16[40,3]@0.001..0.01", z="f16[40,3]@0..15", b="f16[40]",
    ),
    "words of eight nibbles": layer(
        "shifts = torch.arange(0, 32, 4, device=x.device)\n"
        "q = ((w[:, :, None] >> shifts) & 0xF).reshape(w.shape[0], -1).to(x.dtype) - 8\n"
        "return F.linear(x, q * s[:, None])",
        x=X, w="i32[40,24]", s=S,
    ),
    "two bits, and a length that no block divides": layer(
        "q = torch.stack([(w >> i) & 3 for i in (0, 2, 4, 6)], dim=-1).flatten(1)\n"
        "return F.linear(x, (q.to(x.dtype) - 1.5) * s[:, None])",
        x="f16[B,4*K]", w="u8[40,K]@0..255", s=S, sizes="B=5 K=13",
    ),
    "AWQ: words along the columns, in its order": layer(
        "shifts = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28], dtype=torch.int32, device=x.device)\n"
        "q = ((w[:, :, None] >> shifts) & 0xF).reshape(w.shape[0], -1)\n"
        "z = ((z[:, :, None] >> shifts) & 0xF).reshape(z.shape[0], -1)\n"
        "q = q.view(s.shape[0], -1, s.shape[1]) - z[:, None]\n"
        "return F.gelu(x @ (q.to(x.dtype) * s[:, None]).view(w.shape[0], -1))",
        x=X, w="i32[192,5]", z="i32[3,5]", s="f16[3,40]@0.001..0.01",
    ),
    "bytes along the columns": layer(
        "q = torch.stack([w & 15, w >> 4], -1).flatten(1).to(x.dtype) - 8\n"
        "return x @ (q * s)",
        x=X, w="u8[192,20]@0..255", s=S,
    ),
}  # fmt: skip
PLAIN = {
    "int8, one scale per row": layer("return x @ (w.to(x.dtype) * s[:, None]).T", x=X, w="i8[40,192]@-127..127", s=S),
    "int8, scale of the result": layer("return (x @ w.to(x.dtype).t()) * s", x=X, w="i8[40,192]@-127..127", s=S),
    "int8, scales per group": layer(
        "return F.linear(x, (w.view(40, 3, 64).to(x.dtype) * s[..., None]).view(40, 192))",
        x=X, w="i8[40,192]@-127..127", s="f16[40,3]@0.001..0.01",
    ),
    "halves of a row": layer(
        "q = torch.cat([(w & 0xF).to(torch.int8) - 8, (w >> 4).to(torch.int8) - 8], dim=1)\n"
        "return x @ (q.to(x.dtype) * s[:, None]).t()",
        x=X, w="u8[40,96]@0..255", s=S,
    ),
    "GPTQ: words along the rows": layer(
        "shifts = torch.arange(0, 32, 4, device=x.device, dtype=torch.int32)\n"
        "q = ((w[:, None, :] >> shifts[None, :, None]) & 0xF).reshape(192, 40)\n"
        "g = torch.arange(192, device=x.device) // 64\n"
        "return x @ ((q.to(x.dtype) - z[g]) * s[g])",
        x=X, w="i32[24,40]", z="f16[3,40]@0..15", s="f16[3,40]@0.001..0.01",
    ),
    "GPTQ with functions for shifts": layer(
        "shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=x.device)\n"
        "q = (torch.bitwise_right_shift(w[:, None, :], shifts[None, :, None]) & 15).reshape(192, 40)\n"
        "g = torch.arange(192, device=x.device) // 64\n"
        "return x @ (s[g] * (q - z[g]))",
        x=X, w="i32[24,40]", z="f16[3,40]@0..15", s="f16[3,40]@0.001..0.01",
    ),
}  # fmt: skip


def computed(capture: Capture) -> list[str]:
    """All nodes but tensors of numbers in the code, which are in memory."""
    return [node.name for node in capture.graph.nodes if node.word != "tensor"]


@pytest.mark.parametrize("name", [*PACKED, *PLAIN])
def test_weights_are_converted_in_the_kernel_of_the_product(checker: Checker, name: str) -> None:
    text = {**PACKED, **PLAIN}[name]
    capture = checker.capture(text)
    candidate = fused(capture, text, TILE, computed(capture))
    assert len(candidate.launches) == 1
    assert checker.first_failure(capture, candidate, some_cases(capture)) == ""
    assert checker.compile_errors(capture, candidate) == []


@pytest.mark.parametrize("name", PACKED)
def test_each_packed_integer_is_loaded_once(checker: Checker, name: str) -> None:
    capture = checker.capture(PACKED[name])
    source = fused(capture, PACKED[name], TILE, computed(capture)).source
    assert source.count("tl.load(w_ptr") == source.count("tl.load(x_ptr") == 1
    assert "tl.join(" in source


def test_a_sum_over_packed_weights_can_be_split(checker: Checker) -> None:
    text = PACKED["nibbles, one scale per row"]
    capture = checker.capture(text)
    candidate = fused(capture, text, {**TILE, "split_k": 2})
    assert checker.first_failure(capture, candidate, some_cases(capture)) == ""


LARGE = {"[B,192]": "[B,1024]", "[40,96]": "[2048,512]", "[40,192]": "[2048,1024]", "[40,24]": "[2048,128]", "[24,40]": "[128,2048]",
         "f16[40]": "f16[2048]", "[40,3]": "[2048,16]", "[3,40]": "[16,2048]", "(40, 192)": "(2048, 1024)",
         "(192, 40)": "(1024, 2048)", "(40, 3, 64)": "(2048, 16, 64)", "arange(192": "arange(1024",
         "[192,5]": "[1024,256]", "[3,5]": "[16,256]", "[192,20]": "[1024,1024]"}  # fmt: skip


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("name", [name for name in (*PACKED, *PLAIN) if "no block" not in name])
def test_the_planner_converts_the_weights_in_the_product(checker: Checker, name: str, rows: int) -> None:
    text = {**PACKED, **PLAIN}[name].replace("B=5", f"B={rows}")
    for small, large in LARGE.items():
        text = text.replace(small, large)
    capture = checker.capture(text)
    ir = lower(capture.graph)
    product = next(node.name for node in capture.graph.nodes if ir.product_of_node(node.name))
    fusions = FusionSearch(ir, Schedule(), H200).best()
    region = next(fusion.region for fusion in fusions if product in fusion.nodes)
    integers = {name for name in region.inputs if ir.prims[name].dtype in ("int8", "uint8", "int32")}
    assert integers
