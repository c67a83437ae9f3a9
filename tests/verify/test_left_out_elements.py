"""Reductions that leave out elements at ends of lines and blocks, or add up in bfloat16, are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mtmc_lsp.core.results import Verdict, VerdictStatus
from mtmc_lsp.verify.cases import AT_BLOCKS, PEAKS, PEAKS_DOWN
from mtmc_lsp.verify.worker.values.peaks import with_peaks

Judge = Callable[..., Verdict]
HEAD = "import torch\nimport triton\nimport triton.language as tl\n\n\n@triton.jit\n"
REFERENCE = "import torch\n\n\n# mtmc: x=DTYPE[N,D] N=24 D=1100\ndef reduced(x):\n    return RESULT\n"
LINES = f"""{HEAD}def kernel(x_ptr, out_ptr, length, step, stride, BLOCK: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    best = tl.full((), FILL, tl.float32)
    nans = 0
    for block in range(tl.cdiv(length, BLOCK)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + line * step + at * stride, mask=MASK, other=FILL)
        best = tl.COMBINE(best, tl.REDUCE(x, 0))
        nans += tl.sum((x != x).to(tl.int32), 0)
    tl.store(out_ptr + line, tl.where(nans > 0, float("nan"), best))


def fast(x):
    x = x.contiguous()
    if x.shape[DIM] == 0:
        raise IndexError("no elements")
    out = torch.empty(x.shape[1 - DIM], dtype=x.dtype, device=x.device)
    if out.numel():
        kernel[(out.numel(),)](x, out, x.shape[DIM], x.stride(1 - DIM), x.stride(DIM), BLOCK=256)
    return out
"""
LARGEST = {"COMBINE": "maximum", "REDUCE": "max", "FILL": "-float('inf')", "DIM": "1"}
SMALLEST = {"COMBINE": "minimum", "REDUCE": "min", "FILL": "float('inf')"}
WAYS = {
    "the last element of long rows": ("x.amax(1)", LARGEST, "at < length - block // 4"),
    "the first element of the last block": (
        "x.amin(1)",
        {**SMALLEST, "DIM": "1"},
        "(at < length) & ((at != block * BLOCK) | (block < 3))",
    ),
    "the last element of each block but the first": (
        "x.amax(1)",
        LARGEST,
        "(at < length) & ((at % BLOCK != BLOCK - 1) | (block < 1))",
    ),
    "the last row of long columns": ("x.amin(0)", {**SMALLEST, "DIM": "0"}, "at < length - block // 4"),
}


def filled(text: str, values: dict[str, str], mask: str) -> str:
    for name, value in {**values, "MASK": mask}.items():
        text = text.replace(name, value)
    return text


@pytest.mark.parametrize("way", WAYS)
def test_an_extreme_that_leaves_out_an_element_is_refused(judge: Judge, way: str) -> None:
    result, values, mask = WAYS[way]
    reference = REFERENCE.replace("DTYPE", "f32").replace("RESULT", result)
    if values["DIM"] == "0":
        reference = reference.replace("N=24 D=1100", "N=1100 D=24")
    honest = judge(reference, "reduced", filled(LINES, values, "at < length"), "fast")
    assert honest.is_correct, honest.reason
    wrong = judge(reference, "reduced", filled(LINES, values, mask), "fast")
    assert wrong.status is VerdictStatus.INCORRECT


def test_an_extreme_that_leaves_out_an_element_in_the_middle_of_a_wide_block_is_refused(judge: Judge) -> None:
    reference = REFERENCE.replace("DTYPE", "f32").replace("RESULT", "x.amax(1)")
    honest = filled(LINES, LARGEST, "at < length").replace("BLOCK=256", "BLOCK=1024")
    # The text does not name the position, which is 603 in each block.
    wrong = honest.replace("mask=at < length", "mask=(at < length) & (at * 5 % BLOCK != 967)")
    verdict = judge(reference, "reduced", wrong, "fast")
    assert verdict.status is VerdictStatus.INCORRECT
    assert "peaks everywhere" in verdict.reason, verdict.reason
    assert judge(reference, "reduced", honest, "fast").is_correct


@pytest.mark.parametrize(
    ("argument", "result", "kind"),
    [("f32[N,D]@0..1", "x.amax(1)", "float32"), ("i64[N,D]@-500..500", "x.amax(1)", "int64")],
)
def test_arguments_with_a_stated_range_have_peaks_too(judge: Judge, argument: str, result: str, kind: str) -> None:
    reference = REFERENCE.replace("DTYPE[N,D]", argument).replace("RESULT", result)
    values = LARGEST if kind == "float32" else {**LARGEST, "FILL": "-1000"}
    honest = filled(LINES, values, "at < length")
    if kind == "int64":
        honest = honest.replace("FILL, tl.float32", "FILL, tl.int64").replace("-1000, tl.float32", "-1000, tl.int64")
        honest = honest.replace('tl.where(nans > 0, float("nan"), best)', "best")
    verdict = judge(reference, "reduced", honest, "fast")
    assert verdict.is_correct, verdict.reason
    # Among values of equal chance, the last element of a long row is rarely the largest.
    wrong = honest.replace("mask=at < length", "mask=at < length - block // 4")
    assert judge(reference, "reduced", wrong, "fast").status is VerdictStatus.INCORRECT


COLUMNS = f"""{HEAD}def kernel(x_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.TOTAL)
    for begin in range(0, rows, ROWS):
        row = begin + tl.arange(0, ROWS)
        mask = (row[:, None] < rows) & (at < columns)
        total += tl.load(x_ptr + row[:, None].to(tl.int64) * columns + at, mask=mask, other=0.0)
    tl.store(out_ptr + at, tl.sum(total.to(tl.float32), 0), mask=at < columns)


def fast(x):
    x = x.contiguous()
    out = torch.empty(x.shape[1], dtype=x.dtype, device=x.device)
    if out.numel():
        kernel[(triton.cdiv(x.shape[1], 32),)](x, out, x.shape[0], x.shape[1], ROWS=16, BLOCK=32)
    return out
"""


def test_a_long_total_in_bfloat16_is_refused(judge: Judge) -> None:
    reference = REFERENCE.replace("DTYPE", "bf16").replace("RESULT", "x.float().sum(0).to(torch.bfloat16)")
    reference = reference.replace("N=24 D=1100", "N=1024 D=96")
    honest = judge(reference, "reduced", COLUMNS.replace("TOTAL", "float32"), "fast")
    assert honest.is_correct, honest.reason
    wrong = judge(reference, "reduced", COLUMNS.replace("TOTAL", "bfloat16"), "fast")
    assert wrong.status is VerdictStatus.INCORRECT


PRODUCT = "import torch\n\n\n# mtmc: x=bf16[M,K] y=bf16[K,N] M=40 K=4096 N=40\ndef product(x, y):\n    return x @ y\n"
TILES = f"""{HEAD}def kernel(x_ptr, y_ptr, out_ptr, M, N, K, B: tl.constexpr):
    m, n = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros((B, B), tl.float32)
    for start in range(0, K, B):
        k = start + tl.arange(0, B)
        x = tl.load(x_ptr + m[:, None] * K + k, mask=(m[:, None] < M) & (k < K), other=0.0)
        y = tl.load(y_ptr + k[:, None] * N + n, mask=(k[:, None] < K) & (n < N), other=0.0)
        total = ROUNDED
    tl.store(out_ptr + m[:, None] * N + n, total.to(tl.bfloat16), mask=(m[:, None] < M) & (n < N))


def fast(x, y):
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty(x.shape[0], y.shape[1], dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(x.shape[0], 32), triton.cdiv(y.shape[1], 32))
    if out.numel():
        kernel[grid](x, y, out, x.shape[0], y.shape[1], x.shape[1], B=32)
    return out
"""


def test_a_product_whose_sums_are_kept_in_bfloat16_is_refused(judge: Judge) -> None:
    honest = judge(PRODUCT, "product", TILES.replace("ROUNDED", "tl.dot(x, y, total)"), "fast")
    assert honest.is_correct, honest.reason
    rounded = TILES.replace("ROUNDED", "(total + tl.dot(x, y)).to(tl.bfloat16).to(tl.float32)")
    assert judge(PRODUCT, "product", rounded, "fast").status is VerdictStatus.INCORRECT


@pytest.mark.parametrize("dim", [0, 1])
def test_peaks_are_at_ends_and_around_blocks_in_both_dimensions(dim: int) -> None:
    generator = torch.Generator().manual_seed(3)
    shape = (900, 40) if dim == 0 else (40, 900)
    values = torch.randn(shape, generator=generator)
    up, down = (with_peaks(values, name + AT_BLOCKS + "256", generator) for name in (PEAKS, PEAKS_DOWN))
    ends, blocks = {0, 899}, {n * 256 - side for n in (1, 2, 3) for side in (0, 1)}
    for changed in (up, down):
        for extremes in (changed.argmax(dim), changed.argmin(dim)):
            places = extremes.tolist()
            assert ends | {767, 768} <= set(places)
            # Some lines also have peaks of the other dimension.
            assert sum(place in ends | blocks for place in places) > 0.7 * len(places)
    assert (up.argmax().item(), down.argmin().item()) == (values.numel() - 1,) * 2
    single = torch.randn(700, generator=generator)
    assert with_peaks(single, PEAKS, generator).argmax() == with_peaks(single, PEAKS_DOWN, generator).argmin() == 699
