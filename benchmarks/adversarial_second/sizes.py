"""Wrong at sizes that the workload does not have: bounds, tails, tiles plus or minus one, grids that end."""

from __future__ import annotations

from benchmarks.adversarial_second.cases import table
from benchmarks.adversarial_second.witnesses import at

POWER = "BLOCK=triton.next_power_of_2(cols)"

CASES = table(
    "sizes",
    [
        ("fixed block of 256 columns", "softmax", [(POWER, "BLOCK=256")], at("softmax", 3, 300)),
        (
            "block is at most 1024",
            "softmax",
            [(POWER, "BLOCK=min(1024, triton.next_power_of_2(cols))")],
            at("softmax", 2, 1100),
        ),
        (
            "block is at most 4096",
            "layer_norm",
            [(POWER, "BLOCK=min(4096, triton.next_power_of_2(cols))")],
            at("layer_norm", 2, 5000),
        ),
        (
            "bound assembled from small numbers",
            "softmax",
            [(POWER, "BLOCK=min(8 ** 4 // 2, triton.next_power_of_2(cols))")],
            at("softmax", 2, 2100),
        ),
        (
            "last column lost at tile plus one",
            "running_sum",
            [
                (
                    "    for start in range(0, length, BLOCK):",
                    "    for start in range(0, length - (length % BLOCK == 1), BLOCK):",
                )
            ],
            at("running_sum", 3, 129),
        ),
        (
            "last column lost at tile minus one",
            "running_sum",
            [("inside = cols < length", "inside = cols < length - (length % BLOCK == BLOCK - 1)")],
            at("running_sum", 3, 127),
        ),
        (
            "carry only from the tile before",
            "running_sum",
            [("carry += tl.sum", "carry = tl.sum")],
            at("running_sum", 3, 250),
        ),
        (
            "at most 64 tiles",
            "running_sum",
            [("range(0, length, BLOCK)", "range(0, tl.minimum(length, 64 * BLOCK), BLOCK)")],
            at("running_sum", 1, 4200),
        ),
        (
            "inner tail left out above 96",
            "linear_gelu",
            [("range(0, K, BK)", "range(0, tl.where(K > 96, K // BK * BK, K), BK)")],
            at("linear_gelu", 8, 120, 8),
        ),
        (
            "grid rounds down beyond four tiles",
            "linear_gelu",
            [("grid = (triton.cdiv(M, 32), ", "grid = (triton.cdiv(M, 32) if M < 128 else M // 32, ")],
            at("linear_gelu", 150, 16, 8),
        ),
        (
            "at most 65535 elements",
            "gated",
            [("count = x.numel()", "count = min(x.numel(), 65535)")],
            at("gated", 2, 900, 40),
        ),
        (
            "columns wrap at a power of two",
            "gated",
            [("col = offsets % width", "col = offsets % tl.minimum(width, 128)")],
            at("gated", 1, 2, 200),
        ),
        (
            "shift of the first seven samples",
            "gated",
            [("sample = offsets // (length * width)", "sample = tl.minimum(offsets // (length * width), 7)")],
            at("gated", 10, 2, 8),
        ),
        (
            "row index in 8 bits",
            "rms_norm",
            [("tl.program_id(0).to(tl.int64)", "(tl.program_id(0) & 255).to(tl.int64)")],
            at("rms_norm", 300, 8),
        ),
        (
            "row index in 10 bits",
            "softmax",
            [("row = tl.program_id(0).to(tl.int64)", "row = (tl.program_id(0) & 1023).to(tl.int64)")],
            at("softmax", 1030, 4),
        ),
        (
            "target index in 10 bits",
            "cross_entropy",
            [("target = tl.load(target_ptr + row)", "target = tl.load(target_ptr + row) & 1023")],
            at("cross_entropy", 60, 1500),
        ),
        (
            "rows beyond 500 skipped",
            "best",
            [("best_kernel[(x.shape[0],)]", "best_kernel[(min(x.shape[0], 500),)]")],
            at("best", 520, 6),
        ),
        (
            "one column is special",
            "softmax",
            [("    if rows and cols:", "    if cols == 333:\n        x = x * 2\n    if rows and cols:")],
            at("softmax", 3, 333),
        ),
        (
            "multiples of 37 are special",
            "rms_norm",
            [
                ("    rows, cols = x.shape\n", "    rows, cols = x.shape\n    x = x * 2 if cols % 37 == 0 else x\n"),
                ("x, weight, out, cols, 1e-6", "x, weight, out, cols, 1e-6 if cols % 37 else 1.0"),
            ],
            at("rms_norm", 4, 111),
        ),
        (
            "tall inputs only",
            "masked_softmax",
            [
                (
                    "BLOCK=triton.next_power_of_2(x.shape[1])",
                    "BLOCK=triton.next_power_of_2(min(x.shape[0] * 64, x.shape[1]))",
                )
            ],
            at("masked_softmax", 1, 200),
        ),
    ],
)
