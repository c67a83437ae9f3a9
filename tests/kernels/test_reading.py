"""Kernels read from their syntax tree."""

from __future__ import annotations

from benchmarks.kernel_faults.kernels import FIRST, source
from mtmc_lsp.kernels.reading import OperationKind, read_kernels

KIND = OperationKind


def test_a_product_over_a_loop_is_read_with_its_lines_and_depth() -> None:
    text = source("matmul")
    (kernel,) = read_kernels("model.py", text.encode())
    lines = text.splitlines()
    assert kernel.name == "matmul_kernel"
    assert [(item.kind, item.depth) for item in kernel.operations] == [
        (KIND.LOOP, 0), (KIND.LOAD, 1), (KIND.LOAD, 1), (KIND.PRODUCT, 1), (KIND.STORE, 0),
    ]  # fmt: skip
    loop, a, _, product, store = kernel.operations
    assert lines[a.line - 1].strip().startswith("a = tl.load(")
    assert (a.tensor, a.other, a.mask) == ("a_ptr", "0.0", "(offs_m[:, None] < M) & (offs_k[None, :] < K)")
    assert "tl.program_id(0).to(tl.int64) * BLOCK_M" in a.index
    assert loop.text == "range(0, K, BLOCK_K)"
    assert product.text == "a @ b"
    assert (store.tensor, store.mask) == ("c_ptr", "c_mask")


def test_reductions_and_atomic_operations_are_read() -> None:
    (kernel,) = read_kernels("model.py", source("column_sum").encode())
    assert [(item.kind, item.tensor or item.text) for item in kernel.operations] == [
        (KIND.LOAD, "x_ptr"), (KIND.ATOMIC, "out_ptr"), (KIND.REDUCTION, "sum of x"),
    ]  # fmt: skip


def test_every_access_of_every_kernel_belongs_to_a_tensor() -> None:
    for name in FIRST:
        for kernel in read_kernels("model.py", source(name).encode()):
            accesses = [item for item in kernel.operations if item.kind in (KIND.LOAD, KIND.STORE, KIND.ATOMIC)]
            assert accesses
            assert all(item.tensor.endswith("_ptr") for item in accesses), name


DESCRIPTORS = """\
import triton
import triton.language as tl


@triton.jit
def copy_kernel(x_ptr, out_desc, M, N, BM: tl.constexpr, BN: tl.constexpr):
    x_desc = tl.make_tensor_descriptor(x_ptr, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    m = tl.program_id(0) * BM
    for n in range(0, N, BN):
        tile = x_desc.load([m, n])
        out_desc.store([m, n], tile)
        tl.store_tensor_descriptor(out_desc, [m, n], tile)
    state.load(path)
"""


def test_accesses_by_tensor_descriptors_belong_to_a_tensor_and_need_no_mask() -> None:
    (kernel,) = read_kernels("model.py", DESCRIPTORS.encode())
    lines = DESCRIPTORS.splitlines()
    accesses = [item for item in kernel.operations if item.kind is not KIND.LOOP]
    assert [(item.kind, item.tensor, item.depth) for item in accesses] == [
        (KIND.LOAD, "x_ptr", 1), (KIND.STORE, "out_desc", 1), (KIND.STORE, "out_desc", 1),
    ]  # fmt: skip
    assert all("desc" in lines[item.line - 1] and item.mask for item in accesses)
    assert {item.index for item in accesses} == {"[(tl.program_id(0) * BM), n]"}
