"""Faults in the eight kernels of :mod:`benchmarks.kernel_faults.third`, each one replaced text."""

from __future__ import annotations

from benchmarks.kernel_faults.faults import Planted

THIRD_FAULTS = tuple(
    Planted(name, kernel, ((sound, wrong),))
    for name, kernel, sound, wrong in (
        ("counts without mask", "histogram", "bin, 1, mask=valid", "bin, 1"),
        ("counts stored by several programs", "histogram", "tl.atomic_add(", "tl.store("),
        ("memory of counts is not zero", "histogram", "hist = torch.zeros(", "hist = torch.empty("),
        ("block of 200", "histogram", "BLOCK=256", "BLOCK=200"),
        ("sine without mask", "rope", "sin_ptr + pos * half + i, mask=m, other=0.0", "sin_ptr + pos * half + i"),
        ("mask of the whole row for a half", "rope", "m = i < half", "m = i < 2 * half"),
        ("stride of another axis", "rope", "x.stride(1)", "x.stride(0)"),
        ("position without the remainder", "rope", "pos = row % seq_len", "pos = row"),
        (
            "one half is not stored",
            "rope",
            "    tl.store(out_ptr + row * x_row_stride + half + i, hi * cos + lo * sin, mask=m)\n",
            "",
        ),
        ("padding counts in the variance", "fused_layer_norm", "tl.where(cols < N, x - mean, 0.0)", "x - mean"),
        ("mean over the block", "fused_layer_norm", "tl.sum(x, axis=0) / N", "tl.sum(x, axis=0) / BLOCK_N"),
        ("row in 16 bits", "fused_layer_norm", "other=0.0).to(tl.float32)", "other=0.0).to(tl.float16)"),
        ("padding of one", "fused_layer_norm", "mask=cols < N, other=0.0", "mask=cols < N, other=1.0"),
        ("row offset of 1", "fused_layer_norm", "Y += row * stride", "Y += row * stride + 1"),
        (
            "maximum of signed values",
            "quantize_rows",
            "tl.abs(tl.load(x_ptr + row * n_cols + c, mask=c < n_cols, other=0.0))",
            "tl.load(x_ptr + row * n_cols + c, mask=c < n_cols, other=0.0)",
        ),
        ("padding in a maximum", "quantize_rows", "c < n_cols, other=0.0)))", "c < n_cols, other=1.0e6)))"),
        (
            "second loop leaves out the tail",
            "quantize_rows",
            "    for start in range(0, n_cols, BLOCK):\n        c = start + tl.arange(0, BLOCK)\n        v",
            "    for start in range(0, n_cols // BLOCK * BLOCK, BLOCK):\n        c = start + tl.arange(0, BLOCK)\n        v",
        ),
        ("wrong axis", "tile_sum", "tl.sum(tile, axis=1)", "tl.sum(tile, axis=0)"),
        ("strides in the other order", "tile_sum", "x.stride(0), x.stride(1)", "x.stride(1), x.stride(0)"),
        ("mask of columns is missing", "tile_sum", "(rm[:, None] < M) & (rn[None, :] < N)", "rm[:, None] < M"),
        ("mask includes the size", "tile_sum", "mask=rm < M)", "mask=rm <= M)"),
        ("grid rounds down", "masked_dropout", "triton.cdiv(x.numel(), 512)", "x.numel() // 512"),
        ("program times another block", "masked_dropout", "tl.program_id(0) * BLOCK", "tl.program_id(0) * 256"),
        ("store of constant mask", "masked_dropout", "0.0), mask=inside", "0.0), mask=idx >= 0"),
        ("sum is not rescaled", "two_pass_softmax", "z = z * tl.exp(m - safe) + tl.exp", "z = z + tl.exp"),
        ("padding of zero", "two_pass_softmax", 'other=-float("inf"))\n        m_new', "other=0.0)\n        m_new"),
        ("no subtraction of the maximum", "two_pass_softmax", "tl.exp(v - top) / total", "tl.exp(v) / total"),
        (
            "wrong order of strides",
            "linear_relu",
            "weight.stride(0), weight.stride(1)",
            "weight.stride(1), weight.stride(0)",
        ),
        (
            "inner size without mask",
            "linear_relu",
            "mask=(offs_n[None, :] < N) & (offs_k[:, None] < K)",
            "mask=offs_n[None, :] < N",
        ),
        ("tiles by the other size", "linear_relu", "num_n = tl.cdiv(N, BLOCK_N)", "num_n = tl.cdiv(M, BLOCK_M)"),
        ("bias without mask", "linear_relu", "b_ptr + offs_n, mask=offs_n < N, other=0.0", "b_ptr + offs_n"),
    )
)
