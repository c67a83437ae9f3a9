"""The planted faults: one change of a sound kernel each, as an author makes it by mistake."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.kernel_faults.kernels import source


@dataclass(frozen=True)
class Planted:
    """A fault in one kernel."""

    name: str
    kernel: str
    changes: tuple[tuple[str, str], ...]
    """Texts and their replacements; each text occurs once in the file."""

    @property
    def text(self) -> str:
        """The file with the fault."""
        text = source(self.kernel)
        for old, new in self.changes:
            assert text.count(old) == 1, f"{self.name}: {old!r} occurs {text.count(old)} times"
            text = text.replace(old, new)
        return text


FAULTS = (
    Planted("store without mask", "add", ((", x + y, mask=mask)", ", x + y)"),)),
    Planted("load without mask", "add", (("tl.load(y_ptr + offsets, mask=mask)", "tl.load(y_ptr + offsets)"),)),
    Planted(
        "grid rounded down",
        "add",
        (('(triton.cdiv(n_elements, meta["BLOCK_SIZE"]),)', '(n_elements // meta["BLOCK_SIZE"],)'),),
    ),
    Planted(
        "grid by another constant",
        "add",
        (('triton.cdiv(n_elements, meta["BLOCK_SIZE"])', "triton.cdiv(n_elements, 2048)"),),
    ),
    Planted(
        "mask includes one element too many", "add", (("mask = offsets < n_elements", "mask = offsets <= n_elements"),)
    ),
    Planted(
        "block is no power of two", "softmax", (("BLOCK_SIZE = triton.next_power_of_2(n_cols)", "BLOCK_SIZE = n_cols"),)
    ),
    Planted("padding of 0 in a maximum and a sum", "softmax", (('other=-float("inf")', "other=0.0"),)),
    Planted("load without other before a reduction", "softmax", ((', mask=mask, other=-float("inf")', ", mask=mask"),)),
    Planted("32-bit row offset", "softmax", (("tl.program_id(0).to(tl.int64)", "tl.program_id(0)"),)),
    Planted("padding in a variance", "layer_norm", (("tl.where(mask, x - mean, 0.0)", "x - mean"),)),
    Planted("padding of 1 in a mean", "layer_norm", (("other=0.0).to(tl.float32)", "other=1.0).to(tl.float32)"),)),
    Planted(
        "accumulator of 16 bits",
        "matmul",
        (("dtype=tl.float32)", "dtype=tl.float16)"), ("acc += tl.dot(a, b)", "acc += tl.dot(a, b).to(tl.float16)")),
    ),
    Planted("accumulator is overwritten", "matmul", (("acc += tl.dot(a, b)", "acc = tl.dot(a, b)"),)),
    Planted(
        "last block of K is left out",
        "matmul",
        (("range(0, K, BLOCK_K)", "range(0, (K // BLOCK_K) * BLOCK_K, BLOCK_K)"),),
    ),
    Planted(
        "mask without one dimension",
        "matmul",
        (("c_mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)", "c_mask = offs_m[:, None] < M"),),
    ),
    Planted(
        "strides in the wrong order",
        "matmul",
        (("a.stride(0), a.stride(1), b.stride(0)", "a.stride(1), a.stride(0), b.stride(0)"),),
    ),
    Planted(
        "grid of M in both dimensions",
        "matmul",
        (("(triton.cdiv(M, 32), triton.cdiv(N, 32))", "(triton.cdiv(M, 32), triton.cdiv(M, 32))"),),
    ),
    Planted(
        "padded scores enter the softmax",
        "attention",
        (('scores = tl.where(valid, scores, -float("inf"))', "scores = tl.where(valid, scores, 0.0)"),),
    ),
    Planted("running maximum starts at 0", "attention", (('m = -float("inf")\n', "m = 0.0\n"),)),
    Planted(
        "load of values without mask",
        "attention",
        (
            (
                "v = tl.load(v_ptr + keys[:, None] * D + d[None, :], mask=valid[:, None], other=0.0)",
                "v = tl.load(v_ptr + keys[:, None] * D + d[None, :])",
            ),
        ),
    ),
    Planted(
        "output stride of the wrong dimension",
        "transpose",
        (("cols[None, :] * M + rows[:, None], tile", "cols[None, :] * N + rows[:, None], tile"),),
    ),
    Planted(
        "bounds swapped",
        "transpose",
        (("(rows[:, None] < M) & (cols[None, :] < N)", "(rows[:, None] < N) & (cols[None, :] < M)"),),
    ),
    Planted(
        "counts without atomic operation",
        "histogram",
        (
            (
                "tl.atomic_add(counts_ptr + bins, 1, mask=mask)",
                "tl.store(counts_ptr + bins, tl.load(counts_ptr + bins, mask=mask) + 1, mask=mask)",
            ),
        ),
    ),
    Planted("last block of a row is left out", "cumsum", (("tl.cdiv(n_cols, BLOCK)", "n_cols // BLOCK"),)),
    Planted("carry is overwritten", "cumsum", (("carry += tl.sum(x, axis=0)", "carry = tl.sum(x, axis=0)"),)),
    Planted(
        "gather without mask",
        "embedding",
        (
            (
                "values = tl.load(table_ptr + ids[:, None] * dim + cols[None, :], mask=mask)",
                "values = tl.load(table_ptr + ids[:, None] * dim + cols[None, :])",
            ),
        ),
    ),
    Planted(
        "sums stored by several programs", "column_sum", (("tl.atomic_add(out_ptr + cols", "tl.store(out_ptr + cols"),)
    ),
    Planted("memory for sums is not zero", "column_sum", (("torch.zeros(N, device", "torch.empty(N, device"),)),
    Planted(
        "running maximum starts with zeros",
        "row_max",
        (('tl.full((BLOCK,), float("-inf"), dtype=tl.float32)', "tl.zeros((BLOCK,), dtype=tl.float32)"),),
    ),
    Planted(
        "squares added up in 16 bits",
        "rms_norm",
        (
            ("squares = tl.zeros((BLOCK,), dtype=tl.float32)", "squares = tl.zeros((BLOCK,), dtype=tl.float16)"),
            ("other=0.0).to(tl.float32)\n        squares += x * x", "other=0.0)\n        squares += x * x"),
        ),
    ),
    Planted("padding of 0 in a log-sum-exp", "cross_entropy", (('other=float("-inf")', "other=0.0"),)),
    Planted(
        "last block of classes is left out",
        "cross_entropy",
        (("range(0, n_classes, BLOCK)", "range(0, n_classes - BLOCK, BLOCK)"),),
    ),
    Planted("logits without mask", "cross_entropy", ((', mask=off < n_classes, other=float("-inf")', ""),)),
    Planted(
        "grid without the last row",
        "cross_entropy",
        (("ce_kernel[(logits.shape[0],)]", "ce_kernel[(logits.shape[0] - 1,)]"),),
    ),
    Planted("row store without mask", "swiglu", (("c_row, mask=mask", "c_row"),)),
    Planted("row block is no power of two", "swiglu", (("triton.next_power_of_2(n_cols)", "n_cols"),)),
    Planted("mask compares with the block", "swiglu", (("col_offsets < n_cols", "col_offsets < BLOCK_SIZE"),)),
    Planted("stride of the columns", "swiglu", (("c.stride(-2)", "c.stride(-1)"),)),
    Planted("mask without the offset of the loop", "batched_matmul", (("(k[None, :] < rest)", "(k[None, :] < K)"),)),
    Planted(
        "product without accumulator",
        "batched_matmul",
        (('acc = tl.dot(xt, yt, acc, input_precision="ieee")', 'acc = tl.dot(xt, yt, input_precision="ieee")'),),
    ),
    Planted("pointer advances by another stride", "batched_matmul", (("yp += BK * syk", "yp += BK * syn"),)),
    Planted("grid by twice the block", "batched_matmul", (("triton.cdiv(N, 16), B)", "triton.cdiv(N, 32), B)"),)),
    Planted("number of blocks rounded down", "batched_matmul", (("range(0, tl.cdiv(K, BK))", "range(0, K // BK)"),)),
    Planted("padding in squared differences", "variance", (("tl.where(c < n, x - mean, 0.0)", "x - mean"),)),
    Planted("squares are overwritten", "variance", (("sq += diff * diff", "sq = diff * diff"),)),
    Planted(
        "squared differences in 16 bits",
        "variance",
        (("sq = tl.zeros((BLOCK,), tl.float32)", "sq = tl.zeros((BLOCK,), tl.float16)"),),
    ),
    Planted("rows stored by several programs", "scatter_add", (("tl.atomic_add(", "tl.store("),)),
    Planted("memory for rows is not zero", "scatter_add", (("new_zeros", "new_empty"),)),
    Planted("atomic addition without mask", "scatter_add", (("value, mask=keep", "value"),)),
    Planted("row offset by another size", "scatter_add", (("to * dim + d", "to * n + d"),)),
)
"""Fifty faults in 17 kernels; those of the last five kernels were written after the rules."""
