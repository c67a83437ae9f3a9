"""Configurations that an autotuner does not compile: checked against what the compiler makes of the options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mtmc_lsp.capture.worker.user_module import load_user_module
from mtmc_lsp.kernels.actions.tuning.pruning import stages_matter, tile_elements
from tests.kernels.proposing import applied, facts

HEAD = "import triton\nimport triton.language as tl\n\n\n"
ROWS = """@triton.jit
def kernel(x_ptr, w_ptr, o_ptr, n, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row = tl.arange(0, ROWS)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, n, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, mask=column < n, other=0.0)
        w = tl.load(w_ptr + row[:, None] * n + column[None, :], mask=column[None, :] < n, other=0.0)
        total += SUM
    tl.store(o_ptr + tl.program_id(0) * ROWS + row, total)
"""
LAUNCH = """

def run(x, w, out):
    kernel[(1,)](x, w, out, x.shape[0], BLOCK=64, ROWS=64, num_warps=4)
"""
SUM = ROWS.replace("SUM", "tl.sum(w * x[None, :], 1)")
DOT = ROWS.replace("SUM", "tl.sum(tl.dot(w, tl.broadcast_to(x[:, None], (BLOCK, 16))), 1)")
HELPER = "@triton.jit\ndef product(w, x, BLOCK: tl.constexpr):\n    return tl.sum(tl.dot(w, tl.broadcast_to(x[:, None], (BLOCK, 16))), 1)\n\n\n"
CALLED = HELPER + ROWS.replace("SUM", "product(w, x, BLOCK)")
CONSTANTS = {"BLOCK": 64, "ROWS": 64}


def code(text: str, stages: int) -> str:
    """The PTX of a kernel for sm_90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = load_user_module("kernel.py", text, f"pruned_{abs(hash(text))}")
    kernel: Any = module.kernel
    types = {
        "x_ptr": "*fp16",
        "w_ptr": "*fp16",
        "o_ptr": "*fp32",
        "n": "i32",
        "BLOCK": "constexpr",
        "ROWS": "constexpr",
    }
    constants = {(kernel.arg_names.index(name),): value for name, value in CONSTANTS.items()}
    attrs = {(i,): [["tt.divisibility", 16]] for i in range(4)}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_stages": stages})
    # The file's name and lines are in the rest.
    return re.sub(r"//.*|\.file.*|\.loc.*", "", compiled.asm["ptx"].partition(".section")[0])


@pytest.mark.parametrize(
    ("kernel", "matter"), [(SUM, False), (DOT, True), (CALLED, True)], ids=["sum", "dot", "helper"]
)
def test_stages_are_tuned_where_the_compiled_code_depends_on_them(
    kernel: str, matter: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    text = HEAD + kernel + LAUNCH
    known = next(each for each in facts(text, constants=CONSTANTS) if each.name == "kernel")
    assert stages_matter(known) == matter
    assert (code(text, 2) != code(text, 4)) == matter
    tuned = applied(text, "autotune", types="*fp16", constants=CONSTANTS)
    assert (len(set(re.findall(r"num_stages=\d", tuned))) > 1) == matter


def test_a_product_outside_loops_is_not_pipelined() -> None:
    text = HEAD + DOT.replace("for start in range(0, n, BLOCK):", "if n > 0:").replace("start + ", "")
    assert not stages_matter(facts(text + LAUNCH)[0])


@pytest.mark.parametrize(
    ("constants", "elements", "fewest"),
    [({"BLOCK": 64, "ROWS": 64}, 4096, 2), ({"BLOCK": 2048, "ROWS": 128}, 262144, 4), ({}, 0, 2)],
)
def test_large_tiles_get_no_fewer_warps(constants: dict[str, object], elements: int, fewest: int) -> None:
    text = HEAD + SUM + LAUNCH
    known = facts(text, constants=constants)[0]
    assert tile_elements(known, {}) == elements
    warps = [int(n) for n in re.findall(r"num_warps=(\d+), num_s", applied(text, "autotune", constants=constants))]
    assert min(warps) == fewest and max(warps) > 4
    assert tile_elements(known, {"BLOCK": 16}) == (16 * int(str(constants["ROWS"])) if constants else 16)
