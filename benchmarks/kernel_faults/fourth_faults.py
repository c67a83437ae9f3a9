"""Further faults in the kernels of the other tables: 11 that were written before the rules for counterparts, and five after."""

from __future__ import annotations

FOURTH_FAULTS = (
    ("difference instead of a sum", "add", "x + y, mask", "x - y, mask"),
    ("minimum of maxima", "row_max", "tl.max(best, axis=0)", "tl.min(best, axis=0)"),
    ("epsilon outside the root", "layer_norm", "tl.sqrt(variance + eps)", "tl.sqrt(variance) + eps"),
    ("weight and bias exchanged", "layer_norm", "scale * w + b", "scale * b + w"),
    ("loop ends one block early", "matmul", "range(0, K, BLOCK_K)", "range(0, K - BLOCK_K, BLOCK_K)"),
    ("row of the table by the count", "embedding", "ids[:, None] * dim", "ids[:, None] * n_ids"),
    ("root instead of its inverse", "rms_norm", "tl.rsqrt(", "tl.sqrt("),
    ("target without its row", "cross_entropy", "row * n_classes + y", "row + y"),
    ("one pointer stays", "swiglu", "    b += pid * stride\n", ""),
    ("running minimum", "quantize_rows", "best = tl.maximum(best", "best = tl.minimum(best"),
    ("sum of a tile is replaced", "tile_sum", "acc += tl.sum", "acc = tl.sum"),
    ("mean is added", "fused_layer_norm", "(x - mean) * rstd", "(x + mean) * rstd"),
    ("times the total", "two_pass_softmax", "tl.exp(v - top) / total", "tl.exp(v - top) * total"),
    ("rotation in the other direction", "rope", "hi * cos + lo * sin, mask", "hi * cos - lo * sin, mask"),
    ("maximum instead of a sum", "column_sum", "tl.sum(x, axis=0)", "tl.max(x, axis=0)"),
    ("negative part", "linear_relu", "tl.maximum(", "tl.minimum("),
)
