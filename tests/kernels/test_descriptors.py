"""Tensor descriptors take the place of block pointers where a descriptor can describe the tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mtmc_lsp.capture.worker.user_module import load_user_module
from tests.kernels.observing import HEADER, Observing
from tests.kernels.proposing import applied, proposed

PRODUCT = (
    HEADER
    + """\
def expected(a, b, out):
    return out.copy_(a @ b.T)


@triton.jit
def product_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_a, stride_b, stride_k, stride_c,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.program_id(1)
    a_tile = tl.make_block_ptr(
        base=a_ptr, shape=(M, K), strides=(stride_a, 1), offsets=(row * BLOCK, 0), block_shape=(BLOCK, BLOCK_K), order=(1, 0)
    )
    b_tile = tl.make_block_ptr(b_ptr, (K, N), (stride_k, stride_b), (0, column * BLOCK), (BLOCK_K, BLOCK), (0, 1))
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        a = tl.load(a_tile, boundary_check=(0, 1), padding_option="zero")
        total += tl.dot(a, tl.load(b_tile, boundary_check=(0, 1), padding_option="zero"))
        a_tile = tl.advance(a_tile, (0, BLOCK_K))
        b_tile = tl.advance(b_tile, (BLOCK_K, 0))
    c_tile = tl.make_block_ptr(c_ptr, (M, N), (stride_c, 1), (row * BLOCK, column * BLOCK), (BLOCK, BLOCK), (1, 0))
    tl.store(c_tile, total.to(c_tile.dtype.element_ty), boundary_check=(0, 1))


# mtmc: reference=expected a=f32[M,K] b=f32[N,K] out=f32[M,N] M=48 N=64 K=80
def product(a, b, out):
    (M, K), N = a.shape, b.shape[0]
    grid = (triton.cdiv(M, 32), triton.cdiv(N, 32))
    product_kernel[grid](
        a, b, out, M, N, K, a.stride(0), b.stride(0), b.stride(1), out.stride(0), BLOCK=32, BLOCK_K=16
    )
    return out
"""
)
SCAN = (
    HEADER
    + """\
def expected(x):
    return x.flip(1).cumsum(1).flip(1)


@triton.jit
def scan_kernel(x_ptr, out_ptr, T, S, stride, BT: tl.constexpr, BS: tl.constexpr):
    i_s, i_b = tl.program_id(0), tl.program_id(1)
    total = tl.zeros([BS], dtype=tl.float32)
    for i_t in range(tl.cdiv(T, BT) - 1, -1, -1):
        p_x = tl.make_block_ptr(x_ptr + i_b * stride, (T, S), (S, 1), (i_t * BT, i_s * BS), (BT, BS), (1, 0))
        p_out = tl.make_block_ptr(out_ptr + i_b * stride, (T, S), (S, 1), (i_t * BT, i_s * BS), (BT, BS), (1, 0))
        # [BT, BS]
        x = tl.load(p_x, boundary_check=(0, 1), padding_option="zero").to(tl.float32)
        after = tl.sum(x, axis=0)[None, :] - tl.cumsum(x, axis=0) + x + total[None, :]
        tl.store(p_out, after.to(p_out.dtype.element_ty), boundary_check=(0, 1))
        total += tl.sum(x, axis=0)


# mtmc: reference=expected x=f32[B,T,S] B=2 T=40 S=48
def scanned(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    B, T, S = x.shape
    scan_kernel[(triton.cdiv(S, 32), B)](x, out, T, S, T * S, BT=16, BS=32)
    return out
"""
)
HAS_BLOCK_POINTERS = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)


def test_pointers_that_a_loop_advances_become_descriptors_with_offsets() -> None:
    text = applied(PRODUCT, "descriptors")
    for line in (
        "    if ALIGNED:\n        a_tile = tl.make_tensor_descriptor(a_ptr, shape=[M, K], strides=[stride_a, 1], "
        "block_shape=[BLOCK, BLOCK_K])\n        a_tile_column = 0\n",
        "shape=[N, K], strides=[stride_b, 1], block_shape=[BLOCK, BLOCK_K])\n        b_tile_row = 0\n    else:\n",
        "        a = a_tile.load([row * BLOCK, a_tile_column]) if ALIGNED else tl.load(a_tile, boundary_check=(0, 1), ",
        "tl.dot(a, (tl.trans(b_tile.load([column * BLOCK, b_tile_row])) if ALIGNED else tl.load(b_tile, ",
        "            a_tile_column += BLOCK_K\n            b_tile_row += BLOCK_K\n        else:\n",
        "    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, ALIGNED: tl.constexpr,\n):",
        '    all(args[name].data_ptr() % 16 == 0 for name in ("a_ptr", "b_ptr"))\n',
        '    and args["stride_k"] == 1\n',
        '    and all(args[name] % 16 == 0 for name in ("stride_a", "BLOCK_K", "stride_b"))\n',
        '    and args["BLOCK_K"] * args["a_ptr"].element_size() >= 16\n',
        "    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, "
        'device="cuda"))\n    product_kernel[grid](\n',
    ):
        assert line in text, line
    assert "c_tile = tl.make_block_ptr(c_ptr, (M, N)" in text, "no loop reads it"


def test_pointers_that_a_loop_makes_become_descriptors_above_it() -> None:
    text = applied(SCAN, "descriptors")
    for line in (
        "    if ALIGNED:\n        p_x = tl.make_tensor_descriptor(x_ptr + i_b * stride, shape=[T, S], strides=[S, 1], "
        "block_shape=[BT, BS])\n    for i_t in",
        "        if not ALIGNED:\n            p_x = tl.make_block_ptr(",
        '        x = (p_x.load([i_t * BT, i_s * BS]) if ALIGNED else tl.load(p_x, boundary_check=(0, 1), padding_option="zero"))',
        '    and all(args[name] % 16 == 0 for name in ("S", "stride", "BS"))\n',
    ):
        assert line in text, line
    assert "        p_out = tl.make_block_ptr(" in text


@pytest.mark.parametrize(
    "change",
    [
        ("strides=(stride_a, 1)", "strides=(stride_a, 2)"),
        ("base=a_ptr,", "base=a_ptr + row,"),
        (
            '        a = tl.load(a_tile, boundary_check=(0, 1), padding_option="zero")',
            "        a = tl.load(a_tile, eviction_policy='evict_last')",
        ),
        (
            '        a = tl.load(a_tile, boundary_check=(0, 1), padding_option="zero")',
            "        a = tl.load(a_tile, padding_option='nan')",
        ),
        ("        a = tl.load(a_tile,", "        helper(a_tile)\n        a = tl.load(a_tile,"),
        ("    for k in range", "    row += 1\n    for k in range"),
        ("        a_tile = tl.advance(a_tile, (0, BLOCK_K))", "        a_tile = tl.advance(b_tile, (0, BLOCK_K))"),
        ("    total = tl.zeros", "    M = 3\n    a_tile_column = 1\n    total = tl.zeros"),
        ("    a_tile = tl.make_block_ptr(", "    if M > 0: a_tile = tl.make_block_ptr("),
    ],
)
def test_a_pointer_stays_where_a_descriptor_is_not_certain(change: tuple[str, str]) -> None:
    changed = PRODUCT.replace(*change)
    assert changed != PRODUCT
    assert not any("a_tile" in item.title for item in proposed(changed, "descriptors"))


@pytest.mark.parametrize(
    "change",
    [
        ("import torch\n", "import torch as th\n"),
        ("    row = tl.program_id(0)", "    ALIGNED = 1\n    row = tl.program_id(0)"),
        ("b.stride(1), out.stride(0), BLOCK=32", "b.stride(1), out.stride(0), *[32]"),
        ("    return out\n", "    print(product_kernel)\n    return out\n"),
    ],
)
def test_a_kernel_stays_if_its_launches_cannot_tell(change: tuple[str, str]) -> None:
    changed = PRODUCT.replace(*change)
    assert changed != PRODUCT
    assert proposed(changed, "descriptors") == []


@pytest.mark.parametrize(
    ("text", "launcher", "sizes"),
    [
        (PRODUCT, "product", [{"M": 48, "N": 64, "K": 80}, {"M": 20, "N": 36, "K": 32}, {"M": 32, "N": 32, "K": 16}]),
        (SCAN, "scanned", [{"B": 2, "T": 40, "S": 48}, {"B": 1, "T": 16, "S": 16}]),
    ],
)
def test_descriptors_compute_the_same(
    text: str, launcher: str, sizes: list[dict[str, int]], observe: Observing
) -> None:
    # The last block pointer is no candidate, and Triton 3.9 has none.
    edited = applied(text, "descriptors")
    if not HAS_BLOCK_POINTERS:
        edited = without_other_pointers(edited)
    odd = [{name: size + 5 for name, size in sizes[0].items()}] if HAS_BLOCK_POINTERS else []
    for trace in observe(edited, launcher, *sizes, *odd):
        assert not trace.faults, trace.faults


def without_other_pointers(text: str) -> str:
    """The text with the block pointer that is only written as a descriptor, too."""
    text = text.replace(
        "tl.make_block_ptr(c_ptr, (M, N), (stride_c, 1), (row * BLOCK, column * BLOCK), (BLOCK, BLOCK), (1, 0))",
        "tl.make_tensor_descriptor(c_ptr, [M, N], [stride_c, 1], [BLOCK, BLOCK])",
    ).replace(
        "tl.store(c_tile, total.to(c_tile.dtype.element_ty), boundary_check=(0, 1))",
        "c_tile.store([row * BLOCK, column * BLOCK], total)",
    )
    return text.replace(
        "p_out = tl.make_block_ptr(out_ptr + i_b * stride, (T, S), (S, 1), (i_t * BT, i_s * BS), (BT, BS), (1, 0))",
        "p_out = tl.make_tensor_descriptor(out_ptr + i_b * stride, [T, S], [S, 1], [BT, BS])",
    ).replace(
        "tl.store(p_out, after.to(p_out.dtype.element_ty), boundary_check=(0, 1))",
        "p_out.store([i_t * BT, i_s * BS], after)",
    )


TYPES = {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp16", "x_ptr": "*fp16", "out_ptr": "*fp16"}


@pytest.mark.parametrize(
    ("text", "name", "constants"),
    [
        (PRODUCT, "product_kernel", {"BLOCK": 64, "BLOCK_K": 64, "ALIGNED": True}),
        (SCAN, "scan_kernel", {"BT": 32, "BS": 64, "ALIGNED": True}),
    ],
)
def test_a_hopper_gpu_copies_the_tiles_of_descriptors(
    text: str, name: str, constants: dict[str, object], tmp_path: Path
) -> None:
    edited = without_other_pointers(applied(text, "descriptors"))
    file = tmp_path / "model.py"
    file.write_text(edited + f"\n\nkernel = triton.JITFunction({name}.fn.fn)\n")
    kernel = load_user_module(str(file), file.read_text(), f"descriptors_{name}").kernel
    others = [parameter for parameter in kernel.arg_names if parameter not in constants and parameter not in TYPES]
    types = {parameter: TYPES[parameter] for parameter in kernel.arg_names if parameter in TYPES}
    signature = {**types, **dict.fromkeys(others, "i32"), **dict.fromkeys(constants, "constexpr")}
    ordered = {parameter: signature[parameter] for parameter in kernel.arg_names}
    compiled = triton.compile(ASTSource(kernel, ordered, constants), target=GPUTarget("cuda", 90, 32))
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"]
