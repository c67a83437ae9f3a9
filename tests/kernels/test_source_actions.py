"""Edits that make kernels faster: which are proposed, which are refused, and what they leave of the author's text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtmc_lsp.kernels.actions.catalogue import ACTIONS, WHEN_IT_PAYS, excluded_kinds, proposals
from mtmc_lsp.kernels.actions.tuning.autotune import alternatives
from mtmc_lsp.kernels.messages import Access
from mtmc_lsp.kernels.search import changed_lines
from tests.kernels.observing import HEADER
from tests.kernels.proposing import applied, facts, proposed

ADD = (
    HEADER
    + '''\
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Adds two vectors."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n  # the last block is shorter
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    y = tl.load(y_ptr + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + offsets, x + y, mask=mask)


def add(x, y):
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK=1024, num_warps=4)
    return out
'''
)
SCALE = (
    HEADER
    + """\
@triton.jit
def scale_kernel(x_ptr, scale_ptr, out_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = 0.0
    for start in range(0, n, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        # one factor for each row
        scale = tl.load(scale_ptr + row)  # float32
        x = tl.load(x_ptr + row * n + offsets, mask=offsets < n, other=0.0)
        total += tl.sum(x * scale)
    tl.store(out_ptr + row, total)


def scale(x, factors):
    out = torch.empty_like(factors)
    scale_kernel[(x.shape[0],)](x, factors, out, x.shape[1], BLOCK=256)
    return out
"""
)
PRODUCT = (
    HEADER
    + """\
@triton.jit
def product_kernel(
    a_ptr, b_ptr, c_ptr,
    M, N, K,
    BLOCK: tl.constexpr,  # of all dimensions
):
    pid_m = tl.program_id(0)
    pid_n = tl.program_id(1)
    rows = (pid_m * BLOCK + tl.arange(0, BLOCK)) % M
    columns = pid_n * BLOCK + tl.arange(0, BLOCK)
    inner = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK)):
        a = tl.load(a_ptr + rows[:, None] * K + (k * BLOCK + inner)[None, :], mask=(k * BLOCK + inner)[None, :] < K, other=0.0)
        b = tl.load(b_ptr + (k * BLOCK + inner)[:, None] * N + columns[None, :], mask=((k * BLOCK + inner)[:, None] < K) & (columns[None, :] < N), other=0.0)
        total += tl.dot(a.to(tl.float32), b.to(tl.float32))
    here = pid_m * BLOCK + tl.arange(0, BLOCK)
    tl.store(c_ptr + here[:, None] * N + columns[None, :], total, mask=(here[:, None] < M) & (columns[None, :] < N))


def product(a, b):
    c = torch.empty((a.shape[0], b.shape[1]), device=a.device)
    grid = (triton.cdiv(a.shape[0], 32), triton.cdiv(b.shape[1], 32))
    product_kernel[grid](a, b, c, a.shape[0], b.shape[1], a.shape[1], BLOCK=32)
    return c
"""
)


def test_autotune_replaces_fixed_values_and_keeps_all_other_lines() -> None:
    text = applied(ADD, "autotune")
    assert (
        '@triton.autotune(\n    configs=[\n        triton.Config({"BLOCK": 1024}, num_warps=4, num_stages=3),' in text
    )
    assert '    key=["n"],\n    cache_results=True,\n)\n@triton.jit\n' in text
    launch = 'add_kernel[lambda META: (triton.cdiv(x.numel(), META["BLOCK"]),)](x, y, out, x.numel())'
    assert launch in text
    kept = [line for line in ADD.splitlines() if "add_kernel[" not in line]
    assert [line for line in text.splitlines() if line in kept] == kept


def test_autotune_removes_options_that_each_configuration_sets() -> None:
    with_ctas = ADD.replace("num_warps=4", "num_warps=4, num_ctas=1")
    assert applied(with_ctas, "autotune") == applied(ADD, "autotune")


def test_autotune_measures_other_block_sizes_only_where_every_access_is_masked() -> None:
    whole = ADD.replace("tl.load(y_ptr + offsets, mask=mask, other=0.0)", "tl.load(y_ptr + offsets)")
    text = applied(whole, "autotune")
    assert "BLOCK=1024)" in text
    assert '"BLOCK"' not in text


def test_autotune_restores_what_the_kernel_reads_and_writes() -> None:
    in_place = ADD.replace("out_ptr + offsets, x + y", "x_ptr + offsets, x + y")
    assert 'restore_value=["x_ptr"],' in applied(in_place, "autotune")


def test_autotune_restores_a_tensor_that_a_launch_passes_twice() -> None:
    """Observation gives it the name that the first launch of the file passes it as."""
    accesses = [
        Access("add_kernel", 10, "load", "before_ptr", "contiguous", True, 1, 10**11, 10**9),
        Access("add_kernel", 12, "store", "result_ptr", "contiguous", True, 1, 10**11, 10**9),
    ]
    assert "restore_value" not in applied(ADD, "autotune", accesses=accesses)
    accesses[1] = replace(accesses[1], tensor="before_ptr")
    assert 'restore_value=["out_ptr"],' in applied(ADD, "autotune", accesses=accesses)


@pytest.mark.parametrize(
    "change",
    [
        ("@triton.jit", '@triton.autotune(configs=(triton.Config({}, num_warps=4),), key=["n"])\n@triton.jit'),
        ("x.numel(), BLOCK=1024", "x.numel(), **options"),
        ("    return out\n", "    add_kernel.warmup(x)\n    return out\n"),
        ("BLOCK=1024, num_warps=4", "BLOCK=1024,  # measured on an A100\n        num_warps=4"),
        ("num_warps=4", "num_warps=4, num_ctas=2"),
    ],
)
def test_autotune_leaves_kernels_alone_that_it_could_break(change: tuple[str, str]) -> None:
    assert proposed(ADD.replace(*change), "autotune") == []


def test_each_block_size_becomes_the_first_configuration_once() -> None:
    found = proposed(ADD, "autotune")[0]
    texts = [text.decode() for text in alternatives(found, ADD.encode())]
    first = [text.split("triton.Config(")[1].split("}")[0] for text in texts]
    assert len(first) == len(set(first)) >= 1
    assert '{"BLOCK": 1024' not in first


def test_a_load_that_does_not_change_goes_above_the_loop_with_its_comment() -> None:
    found = proposed(SCALE, "hoist")
    assert [item.title for item in found] == ["Load scale_ptr + row once above the loop"]
    text = found[0].applied(SCALE.encode()).decode()
    assert "    scale = tl.load(scale_ptr + row)  # float32\n    for start in range(0, n, BLOCK):\n" in text
    assert changed_lines(SCALE.encode(), text.encode()) <= 2


@pytest.mark.parametrize(
    "change",
    [
        ("scale_ptr + row)", "scale_ptr + start)"),
        ("        total +=", "        tl.atomic_add(scale_ptr + row, 1.0)\n        total +="),
        ("        total +=", "        tl.store(out_ptr, total)\n        total +="),
        ("x * scale", "helper(x) * scale"),
        ("        total +=", "        scale = 2 * scale\n        total +="),
    ],
)
def test_a_load_stays_in_a_loop_that_changes_it_or_may_write_memory(change: tuple[str, str]) -> None:
    changed = SCALE.replace(*change)
    assert changed != SCALE
    assert proposed(changed, "hoist") == []


def test_equal_loads_run_once() -> None:
    text = ADD.replace(
        "tl.load(y_ptr + offsets, mask=mask, other=0.0)", "tl.load(x_ptr + offsets, mask=mask, other=0.0)"
    )
    found = proposed(text, "hoist")
    assert [item.title for item in found] == ["Use x instead of the same load again"]
    assert "    y = x\n" in found[0].applied(text.encode()).decode()


def test_masks_and_modulo_are_left_out_where_blocks_divide_the_length() -> None:
    text = applied(PRODUCT, "even-blocks")
    assert '@triton.heuristics({"EVEN_K": lambda args: args["K"] % args["BLOCK"] == 0})\n@triton.jit\n' in text
    assert "    BLOCK: tl.constexpr,  # of all dimensions\n    EVEN_K: tl.constexpr,\n):" in text
    assert (
        "        if EVEN_K:\n            a = tl.load(a_ptr + rows[:, None] * K + (k * BLOCK + inner)[None, :])\n"
        in text
    )
    assert "columns[None, :], mask=(columns[None, :] < N), other=0.0)\n        else:\n" in text, "the other bound stays"
    assert text.count("if EVEN_K:") == 1, "neighbouring loads share a condition"
    modulo = applied(PRODUCT, "vectorize")
    assert "    rows = pid_m * BLOCK + tl.arange(0, BLOCK)\n    if not EVEN_M:\n        rows = rows % M\n" in modulo


def test_a_new_parameter_after_defaults_has_a_default() -> None:
    text = applied(PRODUCT.replace("BLOCK: tl.constexpr,  # of", "BLOCK: tl.constexpr = 32,  # of"), "even-blocks")
    assert "    BLOCK: tl.constexpr = 32,  # of all dimensions\n    EVEN_K: tl.constexpr = False,\n):" in text


def test_no_constant_is_derived_for_a_kernel_that_another_kernel_calls() -> None:
    text = PRODUCT + "\n\n@triton.jit\ndef outer(a_ptr, BLOCK: tl.constexpr):\n    product_kernel(a_ptr, BLOCK)\n"
    assert proposed(text, "even-blocks") == []


def test_operands_of_16_bits_are_multiplied_as_they_are() -> None:
    assert "tl.dot(a, b)" in applied(PRODUCT, "precision", types="*fp16")
    assert proposed(PRODUCT, "precision", types="*fp32") == []


def test_programs_of_a_large_product_are_grouped() -> None:
    text = applied(PRODUCT, "grouped-order")
    line = "    pid_n, pid_m = tl.swizzle2d(pid_n, pid_m, tl.num_programs(1), tl.num_programs(0), 8)\n"
    assert f"    pid_n = tl.program_id(1)\n{line}" in text
    assert proposed(text, "grouped-order") == []


def test_a_loop_without_a_product_loads_ahead() -> None:
    assert "for start in tl.range(0, n, BLOCK, num_stages=2):" in applied(SCALE, "pipeline")


def test_without_a_gpu_edits_that_only_a_measurement_can_judge_are_left_out() -> None:
    kinds = {item.name for item in proposals(facts(SCALE), has_gpu=False)}
    assert "pipeline" not in kinds
    assert "pipeline" in {item.name for item in proposals(facts(SCALE, has_gpu=True), has_gpu=True)}


def test_streamed_and_reused_tensors_get_cache_policies() -> None:
    lines = {name: next(i for i, row in enumerate(ADD.splitlines(), 1) if f"{name} = tl.load" in row) for name in "xy"}
    seen = [
        Access("add_kernel", lines["x"], "load", "x_ptr", "contiguous", True, 1, 1 << 24, 1 << 24),
        Access("add_kernel", lines["y"], "load", "y_ptr", "contiguous", True, 1, 1 << 24, 1 << 14),
    ]
    text = applied(ADD, "cache", accesses=seen)
    assert 'x = tl.load(x_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_first")' in text
    assert 'y = tl.load(y_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_last")' in text


def test_strict_precision_leaves_edits_out_that_change_rounding() -> None:
    assert excluded_kinds(["cache"], [], is_strict=True) == {"cache", "fuse", "one-pass", "split-k"}
    assert excluded_kinds([], [], is_strict=False) == frozenset()
    assert "autotune" not in excluded_kinds([], ["autotune"], is_strict=True)
    assert "hoist" in excluded_kinds([], ["autotune"], is_strict=False)


def test_every_kind_of_edit_says_when_it_pays() -> None:
    kinds = {item.name for text in (ADD, SCALE, PRODUCT) for item in proposals(facts(text), has_gpu=True)}
    assert kinds <= WHEN_IT_PAYS.keys()
    assert len(ACTIONS) >= len(WHEN_IT_PAYS)


TUNED = ADD.replace(
    "@triton.jit\n",
    """\
@triton.autotune(
    configs=[
        triton.Config({"BLOCK": 256}, num_warps=4),
        triton.Config({"BLOCK": 1024}, num_warps=8),  # for large tensors
    ],
    key=["n"],
)
@triton.jit
""",
).replace("(triton.cdiv(x.numel(), 1024),)", 'lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)')


def test_the_authors_autotuner_gets_more_configurations() -> None:
    text = TUNED.replace(", BLOCK=1024, num_warps=4)", ")")
    edited = applied(text, "autotune")
    assert 'triton.Config({"BLOCK": 1024}, num_warps=8),\n        triton.Config({"BLOCK": 256}, num_warps=8' in edited
    added = [line for line in edited.splitlines() if "Config(" in line and line not in text.splitlines()]
    # Without a GPU no other block size is proposed: none would run before it is delivered.
    assert all('"BLOCK": 256' in line or '"BLOCK": 1024' in line for line in added)
    on_gpu = applied(text, "autotune", has_gpu=True)
    assert '{"BLOCK": 512}' in on_gpu or '{"BLOCK": 128}' in on_gpu


def test_computed_configurations_are_extended_by_a_sum() -> None:
    text = TUNED.replace("(triton.cdiv", "(triton.cdiv")
    start, end = text.index("[\n        triton.Config"), text.index("],\n    key")
    text = text[:start] + "[triton.Config({}, num_warps=w) for w in (4, 8)" + text[end:]
    added = applied(text, "autotune").partition("for w in (4, 8)] + [")[2]
    assert added.startswith("triton.Config({}, num_warps=2, num_stages=3)]"), "the author has 4 and 8 warps"
    unknown = text.replace("(4, 8)", "warps()")
    assert "for w in warps()] + [triton.Config({}, num_warps=8, num_stages=3)" in applied(unknown, "autotune")


def test_a_block_size_that_the_author_never_varies_stays() -> None:
    text = TUNED.replace(", BLOCK=1024, num_warps=4)", ")").replace(
        '{"BLOCK": 1024}, num_warps=8', '{"BLOCK": 256}, num_warps=8'
    )
    assert '"BLOCK": 512' not in applied(text, "autotune", has_gpu=True)
