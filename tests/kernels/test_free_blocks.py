"""Block sizes that an autotuner may choose: which launches and kernels allow it, and what stays of their text."""

from __future__ import annotations

import pytest

from mtmc_lsp.kernels.actions.tuning.autotune import alternatives
from tests.kernels.observing import HEADER, Observing
from tests.kernels.proposing import applied, proposed

SHIFT = (
    HEADER
    + """\
@triton.jit
def shift_kernel(x_ptr, shift_ptr, out_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    shift = tl.load(shift_ptr)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, x + shift, mask=offsets < n)


def shift(x, by):
    out = torch.empty_like(x)
    n = x.numel()
    BLOCK = 4
    # The number of blocks.
    count = (n + BLOCK - 1) // BLOCK
    shift_kernel[(count,)](x, by, out, n, BLOCK)
    return out
"""
)
ROWS = (
    HEADER
    + """\
@triton.jit
def rows_kernel(x_ptr, out_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        inside = (rows[:, None] < M) & (columns[None, :] < N)
        total += tl.sum(tl.load(x_ptr + rows[:, None] * N + columns[None, :], mask=inside, other=0.0), 1)
    tl.store(out_ptr + rows, total, mask=rows < M)


def rows(x):
    out = torch.empty(x.shape[0], device=x.device)
    BLOCK = 64
    grid = (triton.cdiv(x.shape[0], BLOCK),)
    rows_kernel[grid](x, out, x.shape[0], x.shape[1], BLOCK_M=BLOCK, BLOCK_N=BLOCK)
    return out
"""
)


def test_a_block_size_that_is_passed_last_and_counted_by_hand_is_tuned() -> None:
    text = applied(SHIFT, "autotune")
    assert '    # The number of blocks.\n    count = lambda META: (n + META["BLOCK"] - 1) // META["BLOCK"]\n' in text
    assert "shift_kernel[lambda META: (count(META),)](x, by, out, n)\n" in text
    assert 'triton.Config({"BLOCK": 1024}, num_warps=4' in text, "blocks of 4 elements leave most lanes idle"


def test_if_other_block_sizes_fail_warps_alone_are_tuned() -> None:
    whole, fixed = proposed(ROWS, "autotune")
    assert fixed.fallback_for == whole.title
    assert "BLOCK_M=BLOCK, BLOCK_N=BLOCK)" in fixed.applied(ROWS.encode()).decode()


def test_small_blocks_are_made_larger_and_not_persistent() -> None:
    assert proposed(SHIFT.replace("BLOCK = 4\n", "BLOCK = 256\n"), "persist")
    assert proposed(SHIFT, "persist") == []


def test_of_two_parameters_with_one_size_the_grid_counts_the_blocks_of_programs() -> None:
    text = applied(ROWS, "autotune")
    assert 'grid = lambda META: (triton.cdiv(x.shape[0], META["BLOCK_M"]),)' in text
    assert "rows_kernel[grid](x, out, x.shape[0], x.shape[1])" in text
    assert 'triton.Config({"BLOCK_M": 64, "BLOCK_N": 128}' in text
    assert 'triton.Config({"BLOCK_M": 128, "BLOCK_N": 64}' in text


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(("tl.load(shift_ptr)", "tl.load(shift_ptr + pid)"), id="a value for each block"),
        pytest.param(("tl.load(shift_ptr)", "tl.load(shift_ptr + BLOCK)"), id="a value at the size of a block"),
        pytest.param(("mask=offsets < n)\n    tl", "mask=None)\n    tl.store(out_ptr + pid, 0.0)\n    tl"), id="a result for each block"),
        pytest.param(("x + shift,", "tl.cumsum(x + shift),"), id="a sum within the block"),
        pytest.param(("torch.empty_like(x)", "torch.empty(count, BLOCK)"), id="another use of the size"),
        pytest.param(("(x, by, out, n, BLOCK)", "(x, by, out, n, BLOCK)\n    print(count)"), id="another use of the number"),
        pytest.param(("(n + BLOCK - 1)", "(n + BLOCK + 1)"), id="another number of blocks"),
        pytest.param(("BLOCK = 4\n", "BLOCK = 4 if n < 99 else 8\n"), id="a size that depends on the input"),
    ],
)  # fmt: skip
def test_a_block_size_stays_where_something_else_depends_on_it(change: tuple[str, str]) -> None:
    assert change[0] in SHIFT
    text = SHIFT.replace(*change)
    assert all('"BLOCK"' not in edit.new for item in proposed(text, "autotune") for edit in item.edits)


def test_a_block_that_a_mask_leaves_out_stays() -> None:
    rows = ROWS.replace("inside = (rows[:, None] < M) & (columns[None, :] < N)", "inside = rows[:, None] < M")
    edits = [edit.new for item in proposed(rows, "autotune") for edit in item.edits]
    assert edits and not any('"BLOCK_N"' in new for new in edits)


def test_a_size_that_both_dimensions_of_programs_share_stays() -> None:
    both = ROWS.replace("for start in range(0, N, BLOCK_N):", "for start in range(0, 1):").replace(
        "columns = start + ", "columns = tl.program_id(1) * BLOCK_N + "
    )
    assert all('"BLOCK_M"' not in edit.new for item in proposed(both, "autotune") for edit in item.edits)


def test_rows_that_are_one_block_are_tried_with_more_warps_the_longer_they_are() -> None:
    whole = SHIFT.replace("pid * BLOCK + tl.arange", "pid * n + tl.arange").replace(
        "(x, by, out, n, BLOCK)", "(x, by, out, n, size)"
    )
    assert "num_warps=16" in applied(whole, "autotune") and "num_warps=32" not in applied(whole, "autotune")
    assert "num_warps=32" in applied(whole, "autotune", constants={"BLOCK": 16384})


def test_a_comment_behind_the_argument_before_stays() -> None:
    lines = "\n        x, out, x.shape[0],\n        x.shape[1],  # columns\n        BLOCK_M=BLOCK,\n        BLOCK_N=BLOCK,\n    )"
    text = applied(ROWS.replace("x, out, x.shape[0], x.shape[1], BLOCK_M=BLOCK, BLOCK_N=BLOCK)", lines), "autotune")
    assert "rows_kernel[grid](\n        x, out, x.shape[0],\n        x.shape[1],  # columns\n    )\n" in text


LOOPED = (
    HEADER
    + """\
@triton.jit
def mean_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * n + offsets, mask=offsets < n, other=0.0)
    tl.store(out_ptr + row, tl.sum(total, axis=0) / n)


def mean(x):
    out = x.new_empty(x.shape[0])
    block = min(4096, triton.next_power_of_2(x.shape[1]))
    warps = min(max(block // 256, 1), 8)
    mean_kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=block, num_warps=warps)
    return out
"""
)


def test_a_computed_size_of_a_loop_may_change() -> None:
    edited = applied(LOOPED, "autotune", constants={"BLOCK": 1024})
    assert '"BLOCK": 1024' in edited and '"BLOCK": 2048' in edited
    assert "mean_kernel[(x.shape[0],)](x, out, x.shape[1])" in edited


@pytest.mark.parametrize(
    "change",
    [
        ("[(x.shape[0],)]", "[(x.shape[0] + 0 * block,)]"),
        ("x, out, x.shape[1], BLOCK", "x, out, x.shape[1] + 0 * warps, BLOCK"),
        ("def mean(x):", "def mean(x, block):"),
    ],
)
def test_a_computed_size_stays_where_something_else_depends_on_it(change: tuple[str, str]) -> None:
    text = LOOPED.replace(*change)
    if "block):" in change[1]:
        text = text.replace("    block = min(4096, triton.next_power_of_2(x.shape[1]))\n", "")
    assert '"BLOCK"' not in applied(text, "autotune", constants={"BLOCK": 1024})


def test_positional_arguments_from_a_tuple_do_not_stop_tuning() -> None:
    text = LOOPED.replace("x, out, x.shape[1], BLOCK=block", "x, out, *x.shape[1:], BLOCK=512")
    edited = applied(text, "autotune", constants={"BLOCK": 512})
    assert "mean_kernel[(x.shape[0],)](x, out, *x.shape[1:])" in edited
    assert '"BLOCK": 1024' in edited
    # The last position may belong to any parameter.
    unknown = applied(LOOPED.replace("x, out, x.shape[1], BLOCK=block", "x, *rest(x), 512"), "autotune")
    assert "mean_kernel[(x.shape[0],)](x, *rest(x), 512)" in unknown
    assert '"BLOCK"' not in unknown


SCALED = (
    HEADER
    + """\
@triton.jit
def scale_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, 2 * tl.load(x_ptr + offsets, mask=offsets < n), mask=offsets < n)


def scale(x):
    out = torch.empty_like(x)
    block = min(2048, x.numel())
    scale_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel(), BLOCK=block)
    return out
"""
)


def test_a_computed_size_may_change_where_the_grid_reads_the_configuration() -> None:
    assert '"BLOCK": 4096' in applied(SCALED, "autotune", constants={"BLOCK": 2048})
    fixed = SCALED.replace('meta["BLOCK"]', "block")
    assert '"BLOCK"' not in applied(fixed, "autotune", constants={"BLOCK": 2048})
    elsewhere = SCALED.replace(
        "lambda meta: (triton.cdiv(x.numel(), meta", "lambda meta: (triton.cdiv(x.numel(), sizes"
    )
    assert '"BLOCK":' not in applied(elsewhere, "autotune", constants={"BLOCK": 2048})


GROUPED = (
    HEADER
    + """\
@triton.jit
def product_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_a, stride_b, stride_c,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):
    pid = tl.program_id(axis=0)
    rows = tl.cdiv(M, BLOCK_M)
    columns = tl.cdiv(N, BLOCK_N)
    first = (pid // (GROUP * columns)) * GROUP
    height = min(rows - first, GROUP)
    pid_m = first + ((pid % (GROUP * columns)) % height)
    pid_n = (pid % (GROUP * columns)) // height
    offs_m = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    offs_n = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + offs_m[:, None] * stride_a + offs_k[None, :]
    b_ptrs = b_ptr + offs_k[:, None] * stride_b + offs_n[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        a = tl.load(a_ptrs, mask=offs_k[None, :] < K - k * BLOCK_K, other=0.0)
        b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BLOCK_K, other=0.0)
        total = tl.dot(a, b, total)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * stride_b
    offs_cm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_cn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_cm[:, None] < M) & (offs_cn[None, :] < N)
    tl.store(c_ptr + offs_cm[:, None] * stride_c + offs_cn[None, :], total, mask=mask)


# mtmc: a=f32[M,K] b=f32[K,N] M=70 N=50 K=40
def product(a, b):
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), device=a.device)
    grid = lambda META: (triton.cdiv(M, META["BLOCK_M"]) * triton.cdiv(N, META["BLOCK_N"]),)
    product_kernel[grid](a, b, c, M, N, K, K, N, N, BLOCK_M=32, BLOCK_N=32, BLOCK_K=32, GROUP=2)
    return c
"""
)
CONSTANTS = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "GROUP": 2}


def tuned_blocks(text: str) -> str:
    """The title of the edit that tunes a product."""
    return next(iter(item.title for item in proposed(text, "autotune", constants=CONSTANTS)), "")


@pytest.mark.parametrize("types", ["*fp32", "*fp16"])
def test_the_tiles_of_a_product_whose_offsets_wrap_around_are_tuned(types: str) -> None:
    item = proposed(GROUPED, "autotune", constants=CONSTANTS, types=types)[0]
    assert "the size of BLOCK_M, BLOCK_N, BLOCK_K by 12 configurations" in item.title
    text = item.applied(GROUPED.encode()).decode()
    depth = 32 if types == "*fp32" else 64
    assert f'"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": {depth}}}, num_warps=8, num_stages=3)' in text
    assert "product_kernel[grid](a, b, c, M, N, K, K, N, N, GROUP=2)" in text


def test_a_grid_that_is_a_nested_function_reads_the_configuration() -> None:
    lines = [line for line in GROUPED.splitlines() if "grid = lambda" in line]
    body = lines[0].partition("META: ")[2]
    nested = GROUPED.replace(lines[0], f"    def grid(META):\n        return {body}\n")
    assert "BLOCK_M, BLOCK_N, BLOCK_K" in tuned_blocks(nested)
    assert "BLOCK_M" not in tuned_blocks(nested.replace('META["BLOCK_M"]', "32"))


@pytest.mark.parametrize(
    "change",
    [
        ("    mask = (offs_cm", "    total += tl.sum(total, axis=0)[None, :]\n    mask = (offs_cm"),
        ("(offs_cm[:, None] < M) & ", ""),
        ("BLOCK_M)) % M\n", "BLOCK_M))\n"),
        ("tl.store(c_ptr + offs_cm", "tl.store(c_ptr + pid_m, 0.0)\n    tl.store(c_ptr + offs_cm"),
        ("    pid_m = first", "    first += tl.load(a_ptr).to(tl.int32)\n    pid_m = first"),
        ('META["BLOCK_M"]', "32"),
    ],
)
def test_a_tile_stays_if_results_may_depend_on_its_size(change: tuple[str, str]) -> None:
    changed = GROUPED.replace(*change)
    assert changed != GROUPED
    assert "BLOCK_M" not in tuned_blocks(changed)


def test_all_tiles_compute_the_same_product(observe: Observing) -> None:
    item = proposed(GROUPED, "autotune", constants=CONSTANTS)[0]
    texts = [item.applied(GROUPED.encode()), *alternatives(item, GROUPED.encode())]
    assert len(texts) == 5
    for text in texts:
        for trace in observe(text.decode(), "product", {"M": 70, "N": 50, "K": 40}, original=GROUPED):
            assert not trace.faults, trace.faults
