"""More correct kernels: changes of the algorithms that are not the base kernels."""

from __future__ import annotations

from benchmarks.adversarial_second.cases import Edit

VARIANTS: list[tuple[str, str, list[Edit]]] = [
    ("tiles of 16", "softmax__online", [("TILE=64, num_warps=4", "TILE=16, num_warps=2")]),
    ("tiles wider than the row", "softmax__online", [("TILE=64", "TILE=512")]),
    (
        "a while loop",
        "softmax__online",
        [
            (
                '    for start in tl.range(0, V, TILE):\n        v = start + tl.arange(0, TILE)\n        x = tl.load(base + v * x_stride_v, mask=v < V, other=float("-inf"))\n        top, total = merge(top, total, x)\n',
                '    start = 0\n    while start < V:\n        v = start + tl.arange(0, TILE)\n        x = tl.load(base + v * x_stride_v, mask=v < V, other=float("-inf"))\n        top, total = merge(top, total, x)\n        start += TILE\n',
            )
        ],
    ),
    (
        "a lambda as entry",
        "softmax",
        [
            ("def softmax(x):\n", "def launch(x):\n"),
            ("    return out\n", "    return out\n\n\nsoftmax = lambda x: launch(x)\n"),
        ],
    ),
    (
        "keywords in the launch",
        "softmax",
        [
            (
                "(x, out, x.stride(0), x.stride(1), cols, BLOCK",
                "(x_ptr=x, out_ptr=out, row_stride=x.stride(0), col_stride=x.stride(1), n_cols=cols, BLOCK",
            )
        ],
    ),
    (
        "a launcher with a cache of block sizes",
        "softmax",
        [
            ("import torch\n", "import functools\n\nimport torch\n"),
            (
                "def softmax(x):\n",
                "@functools.lru_cache(maxsize=None)\ndef block(cols):\n    return triton.next_power_of_2(cols)\n\n\ndef softmax(x):\n",
            ),
            ("BLOCK=triton.next_power_of_2(cols)", "BLOCK=block(cols)"),
        ],
    ),
    (
        "a class with a static method",
        "softmax",
        [
            (
                "def softmax(x):\n",
                "class Rows:\n    @staticmethod\n    def count(x):\n        return x.shape\n\n\ndef softmax(x):\n",
            ),
            ("rows, cols = x.shape", "rows, cols = Rows.count(x)"),
        ],
    ),
    ("one program for all rows", "softmax__tiles", [('min(triton.cdiv(M, meta["ROWS"]), 8)', "1")]),
    ("rows by ones", "softmax__tiles", [("ROWS = 4", "ROWS = 1")]),
    ("rows by eights", "softmax__tiles", [("ROWS = 4", "ROWS = 8")]),
    (
        "a module's constant for epsilon",
        "layer_norm",
        [("def layer_norm(x", "EPS = 1e-5\n\n\ndef layer_norm(x"), ("cols, 1e-5,", "cols, EPS,")],
    ),
    (
        "expanded dimensions",
        "layer_norm",
        [
            (
                "mean = tl.sum(x, axis=0) / n_cols",
                "mean = tl.sum(x[None, :], axis=1)\n    mean = tl.sum(mean, axis=0) / n_cols",
            )
        ],
    ),
    ("tiles of 32", "layer_norm__welford", [("BLOCK=128", "BLOCK=32")]),
    ("tiles of 16", "rms_norm__loop", [("BLOCK=32", "BLOCK=16")]),
    ("tiles of 256", "rms_norm__loop", [("BLOCK=32", "BLOCK=256")]),
    ("groups of one", "linear_gelu__grouped", [("G=2", "G=1")]),
    ("groups of eight", "linear_gelu__grouped", [("G=2", "G=8")]),
    (
        "splits of 16",
        "linear_gelu__split",
        [("triton.cdiv(K, 32)", "triton.cdiv(K, 16)"), ("BM=32, BN=32, BK=32", "BM=32, BN=32, BK=16")],
    ),
    (
        "partial products by atomic addition",
        "linear_gelu__split",
        [
            (
                "    where = part_ptr + split * M * N + m[:, None] * N + n[None, :]\n    tl.store(where,",
                "    where = part_ptr + split * M * N + m[:, None] * N + n[None, :]\n    tl.atomic_add(where,",
            ),
            ("parts = torch.empty(", "parts = torch.zeros("),
        ],
    ),
    ("an operator for the scan", "running_sum__scan", [("tl.associative_scan(x, 0, add)", "tl.cumsum(x, 0)")]),
    (
        "backwards through the columns",
        "gated__rows",
        [
            ("        d = start + tl.arange(0, BLOCK)", "        d = D - 1 - start - tl.arange(0, BLOCK)"),
            ("        m = d < D\n", "        m = d >= 0\n"),
        ],
    ),
    ("tiles of 16", "gated__rows", [("BLOCK=32", "BLOCK=16")]),
    ("tiles of 32", "cross_entropy__loop", [("BLOCK=64", "BLOCK=32")]),
    ("four rows at a time", "masked_softmax__rows", [("triton.cdiv(N, 2)", "triton.cdiv(N, 4)"), ("R=2", "R=4")]),
    (
        "mask multiplied",
        "masked_softmax",
        [("tl.where(hidden != 0, -1e9, x)", "tl.where(hidden.to(tl.int1), -1000000000.0, x)")],
    ),
    (
        "tiles of 32",
        "gated_norm__parts",
        [("triton.cdiv(flat.numel(), 128)", "triton.cdiv(flat.numel(), 32)"), ("width, BLOCK=128", "width, BLOCK=32")],
    ),
    (
        "a property for epsilon",
        "gated_norm__parts",
        [
            (
                "    def extra_repr",
                "    @property\n    def small(self) -> float:\n        return self.eps\n\n    def extra_repr",
            ),
            ("width, self.eps, ", "width, self.small, "),
        ],
    ),
    (
        "the index by a reduction of pairs",
        "best",
        [
            (
                "tl.store(index_ptr + row, tl.min(tl.where(hit, cols, BLOCK), axis=0))",
                "first = tl.where(hit, cols, BLOCK)\n    tl.store(index_ptr + row, -tl.max(-first, axis=0))",
            )
        ],
    ),
    (
        "the base kernel's index by argmax",
        "best",
        [("tl.min(tl.where(hit, cols, BLOCK), axis=0)", "tl.argmax(hit.to(tl.int32), axis=0)")],
    ),
]
