"""Products are split among programs, and programs compute several blocks, where that cannot change a result."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtmc_lsp.kernels.actions.persist import persist
from mtmc_lsp.kernels.actions.split_k import split_k
from mtmc_lsp.source.syntax import first_error, parse
from tests.kernels.observing import HEADER, Observing
from tests.kernels.proposing import facts, proposed

PRODUCT = (
    HEADER
    + """\
@triton.jit
def product_kernel(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inner = tl.arange(0, BLOCK)
    a_ptrs = a_ptr + rows[:, None] * K + inner[None, :]
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK)):
        left = K - k * BLOCK
        a = tl.load(a_ptrs, mask=(rows[:, None] < M) & (inner[None, :] < left), other=0.0)
        b = tl.load(b_ptr + (k * BLOCK + inner)[:, None] * N + columns[None, :], mask=(inner[:, None] < left) & (columns[None, :] < N), other=0.0)
        total += tl.dot(a, b)
        a_ptrs += BLOCK
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], total, mask=mask)


# mtmc: a=f32[M,K] b=f32[K,N] M=40 N=40 K=300
def product(a, b):
    c = torch.empty((a.shape[0], b.shape[1]), device=a.device)
    grid = (triton.cdiv(a.shape[0], 16), triton.cdiv(b.shape[1], 16))
    product_kernel[grid](a, b, c, a.shape[0], b.shape[1], a.shape[1], BLOCK=16)
    return c
"""
)
ADD = (
    HEADER
    + """\
@triton.jit
def double_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)

    # the last block is shorter
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, 2 * x, mask=offsets < n)


# mtmc: x=f32[M,N] M=40 N=300
def double(x):
    out = torch.empty_like(x)
    double_kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
    return out
"""
)


def split(text: str, types: str = "*fp32") -> str:
    """The text with a split product, as if a call with four tiles had been observed; the text itself if it stays."""
    for each in facts(text, types):
        few = replace(each, launches=tuple(replace(work, programs=4) for work in each.launches))
        for item in split_k(few):
            changed = item.applied(text.encode())
            assert first_error(parse(changed)) is None
            return changed.decode()
    return text


def test_a_product_with_few_tiles_is_split_among_programs() -> None:
    text = split(PRODUCT)
    assert "    for k in range(tl.program_id(2), tl.cdiv(K, BLOCK), tl.num_programs(2)):\n" in text
    assert "    a_ptrs += tl.program_id(2) * BLOCK\n    for k in" in text
    assert "        a_ptrs += tl.num_programs(2) * BLOCK\n" in text
    assert "tl.atomic_add(c_ptr + rows[:, None] * N + columns[None, :], total, mask=mask)" in text
    assert "    c = torch.zeros((a.shape[0], b.shape[1]), device=a.device)\n" in text
    assert "triton.cdiv(b.shape[1], 16), 16)\n" in text
    assert len(set(PRODUCT.splitlines()) - set(text.splitlines())) == 5


def test_a_product_with_many_tiles_is_not_split() -> None:
    assert proposed(PRODUCT, "split-k") == []


@pytest.mark.parametrize(
    "change",
    [
        ("columns[None, :], total, mask", "columns[None, :], total + 1.0, mask"),
        ("    mask = (rows", "    tl.atomic_add(a_ptr, 1.0)\n    mask = (rows"),
        ("    mask = (rows", "    total = total * 2\n    mask = (rows"),
        ("    mask = (rows", "    tl.store(c_ptr, 0.0)\n    mask = (rows"),
        ("tl.zeros((BLOCK", "tl.ones((BLOCK"),
        ("total += tl.dot(a, b)", "total = tl.dot(a, b)"),
        ("a_ptrs += BLOCK", "a_ptrs += BLOCK + k"),
        ("        a_ptrs +=", "        rows += 1\n        a_ptrs +="),
        ("    return c", "    print(grid)\n    return c"),
        ("c = torch.empty(", "c = torch.full("),
    ],
)
def test_a_product_stays_whole_if_its_parts_cannot_be_added(change: tuple[str, str]) -> None:
    changed = PRODUCT.replace(*change)
    assert changed != PRODUCT
    assert split(changed) == changed


HALF = PRODUCT.replace("columns[None, :], total, mask", "columns[None, :], result, mask").replace(
    "    mask = (rows", "    result = total.to(tl.float16)\n    mask = (rows"
)


@pytest.mark.parametrize(
    ("creation", "new", "dtype"),
    [
        (
            "device=a.device)",
            "torch.zeros((a.shape[0], b.shape[1]), device=a.device, dtype=torch.float32)",
            "torch.float16",
        ),
        ("dtype=a.dtype)", "torch.zeros((a.shape[0], b.shape[1]), dtype=torch.float32)", "a.dtype"),
    ],
)
def test_a_result_in_sixteen_bits_is_added_up_in_float32(creation: str, new: str, dtype: str) -> None:
    text = split(HALF.replace("device=a.device)", creation), types="*fp16")
    assert "    result = total\n" in text
    assert f"    c = {new}\n" in text
    assert f"BLOCK=16)\n    c = c.to({dtype})\n    return c\n" in text


def test_an_autotuner_clears_the_result_before_it_times_a_configuration() -> None:
    tuned = PRODUCT.replace(
        "@triton.jit", '@triton.autotune(configs=[triton.Config({}, num_warps=4)], key=["K"])\n@triton.jit'
    )
    assert 'key=["K"], reset_to_zero=["c_ptr"])\n@triton.jit' in split(tuned)
    restored = tuned.replace('key=["K"]', 'key=["K"], restore_value=["c_ptr"]')
    assert split(restored) == restored


def test_a_split_product_in_sixteen_bits_computes_the_same(observe: Observing) -> None:
    half = HALF.replace("a=f32", "a=f16").replace("b=f32", "b=f16").replace("device=a.device)", "dtype=a.dtype)")
    for trace in observe(split(half, "*fp16"), "product", {"M": 20, "N": 17, "K": 70}, original=half):
        assert not trace.faults, trace.faults


def test_a_split_product_computes_the_same(observe: Observing) -> None:
    sizes = [{"M": 20, "N": 17, "K": 70}, {"M": 16, "N": 16, "K": 16}]
    text = split(PRODUCT)
    for trace in observe(text, "product", *sizes, original=PRODUCT):
        assert not trace.faults, trace.faults
        assert trace.launches[0].grid[2] == 16
    broken = text.replace("a_ptrs += tl.program_id(2) * BLOCK", "a_ptrs += 0")
    assert any(trace.faults for trace in observe(broken, "product", *sizes, original=PRODUCT))


def persistent(text: str) -> str:
    return proposed(text, "persist")[0].applied(text.encode()).decode()


def test_programs_compute_several_blocks_in_a_loop() -> None:
    text = persistent(ADD)
    assert "def double_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, programs):\n" in text
    assert (
        "    for pid in range(tl.program_id(0), programs, tl.num_programs(0)):\n"
        "        offsets = pid * BLOCK + tl.arange(0, BLOCK)\n\n        # the last block is shorter\n" in text
    )
    count = "triton.cdiv(x.numel(), 64)"
    assert f"double_kernel[(min({count}, " in text
    assert f"BLOCK=64, programs={count})" in text


@pytest.mark.parametrize(
    "change",
    [
        ("    offsets =", "    if pid > 4:\n        return\n    offsets ="),
        ("    offsets =", "    x_ptr += 0\n    offsets ="),
        ("tl.arange(0, BLOCK)", "tl.arange(0, BLOCK) + tl.program_id(1)"),
        ("tl.arange(0, BLOCK)", "tl.arange(0, BLOCK) + 0 * tl.num_programs(0)"),
        ("[(triton.cdiv(x.numel(), 64),)]", "[lambda meta: (triton.cdiv(x.numel(), meta['BLOCK']),)]"),
        ("BLOCK: tl.constexpr", "BLOCK: tl.constexpr = 64"),
    ],
)
def test_programs_stay_if_their_bodies_cannot_follow_each_other(change: tuple[str, str]) -> None:
    changed = ADD.replace(*change)
    assert changed != ADD
    assert proposed(changed, "persist") == []


def test_a_kernel_with_few_programs_is_not_changed() -> None:
    for each in facts(ADD):
        few = replace(each, launches=tuple(replace(work, programs=200) for work in each.launches))
        assert list(persist(few)) == []


def test_persistent_programs_compute_the_same(observe: Observing) -> None:
    text = persistent(ADD)
    limit = text.split(", 64), ")[1].split(")")[0]
    few = text.replace(f", {limit})", ", 3)")
    sizes = [{"M": 5, "N": 70}, {"M": 2, "N": 5}]
    for trace in observe(few, "double", *sizes, original=ADD):
        assert not trace.faults, trace.faults
    broken = few.replace("programs, tl.num_programs(0)", "programs, 2 * tl.num_programs(0)")
    assert any(trace.faults for trace in observe(broken, "double", *sizes, original=ADD))


def test_a_block_size_that_the_number_of_blocks_depends_on_is_not_tuned() -> None:
    text = persistent(ADD)
    assert '"BLOCK"' not in proposed(text, "autotune")[0].applied(text.encode()).decode()


def test_a_body_that_does_not_begin_with_the_number_of_its_program_is_indented_as_a_whole() -> None:
    text = ADD.replace("    pid = tl.program_id(0)\n", "    two = 2.0\n    pid = tl.program_id(0)\n")
    edited = persistent(text)
    assert "num_programs(0)):\n        two = 2.0\n        pid = program\n" in edited
