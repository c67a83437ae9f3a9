"""Faults in the five kernels of :mod:`benchmarks.kernel_faults.second`: name, kernel, then each text and its replacement."""

from __future__ import annotations

SECOND_FAULTS = (
    ("padding of 0 in a log-sum-exp", "cross_entropy", 'other=float("-inf")', "other=0.0"),
    (
        "last block of classes is left out",
        "cross_entropy",
        "range(0, n_classes, BLOCK)",
        "range(0, n_classes - BLOCK, BLOCK)",
    ),
    ("logits without mask", "cross_entropy", ', mask=off < n_classes, other=float("-inf")', ""),
    (
        "grid without the last row",
        "cross_entropy",
        "ce_kernel[(logits.shape[0],)]",
        "ce_kernel[(logits.shape[0] - 1,)]",
    ),
    ("row store without mask", "swiglu", "c_row, mask=mask", "c_row"),
    ("row block is no power of two", "swiglu", "triton.next_power_of_2(n_cols)", "n_cols"),
    ("mask compares with the block", "swiglu", "col_offsets < n_cols", "col_offsets < BLOCK_SIZE"),
    ("stride of the columns", "swiglu", "c.stride(-2)", "c.stride(-1)"),
    ("mask without the offset of the loop", "batched_matmul", "(k[None, :] < rest)", "(k[None, :] < K)"),
    (
        "product without accumulator",
        "batched_matmul",
        'acc = tl.dot(xt, yt, acc, input_precision="ieee")',
        'acc = tl.dot(xt, yt, input_precision="ieee")',
    ),
    ("pointer advances by another stride", "batched_matmul", "yp += BK * syk", "yp += BK * syn"),
    ("grid by twice the block", "batched_matmul", "triton.cdiv(N, 16), B)", "triton.cdiv(N, 32), B)"),
    ("number of blocks rounded down", "batched_matmul", "range(0, tl.cdiv(K, BK))", "range(0, K // BK)"),
    ("padding in squared differences", "variance", "tl.where(c < n, x - mean, 0.0)", "x - mean"),
    ("squares are overwritten", "variance", "sq += diff * diff", "sq = diff * diff"),
    (
        "squared differences in 16 bits",
        "variance",
        "sq = tl.zeros((BLOCK,), tl.float32)",
        "sq = tl.zeros((BLOCK,), tl.float16)",
    ),
    ("rows stored by several programs", "scatter_add", "tl.atomic_add(", "tl.store("),
    ("memory for rows is not zero", "scatter_add", "new_zeros", "new_empty"),
    ("atomic addition without mask", "scatter_add", "value, mask=keep", "value"),
    ("row offset by another size", "scatter_add", "to * dim + d", "to * n + d"),
)
