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
    """Pieces of the text, each of which occurs once, and what replaces them."""

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
)
"""Thirty faults in twelve kernels."""
