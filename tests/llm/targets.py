"""Targets that the built-in coder cannot write, each with a correct answer of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from answers import body, editable_text, hunk

from mtmc_lsp.codegen.module.direct_launches import DIRECT_LAUNCHES


@dataclass(frozen=True)
class Target:
    """A user function and a kernel for it."""

    name: str
    operation: str
    """The operation that the built-in coder does not support."""
    source: str
    kernel: str
    launch: str
    """The statements of the launcher that call the kernel."""

    def answer(self, request: dict[str, Any]) -> str:
        """The correct answer of a model."""
        return f"{hunk('', self.kernel)}\n{hunk(body(editable_text(request)), self.launch)}"

    def by_hand(self, text: str) -> str:
        """``text`` (a file whose launcher contains every torch call) after a manual edit that uses the kernel."""
        kernel = f"{self.name}_kernel"
        head = text[text.index(f"def {self.name}_launch(") :].partition("\n")[0]
        launcher = text[text.index(head) :].partition("\n\n\n")[0]
        arguments = head[head.index("(") + 1 : head.index(")")]
        imports = "import triton  # noqa: E402\nimport triton.language as tl  # noqa: E402\n"
        for old, new in (
            (body(launcher), self.launch),
            (head, f"{DIRECT_LAUNCHES}\n\n{head.replace(')', f', {kernel}=_DirectLaunches({kernel}))')}"),
            (
                f"return {self.name}_launch({arguments})",
                f"return {self.name}_launch({arguments}, wrap_triton({kernel}))",
            ),
            (f"# mtmc: begin {self.name}\n", f"# mtmc: begin {self.name}\n{imports}"),
            ("wrap_triton  # noqa: E402\n\n\n", f"wrap_triton  # noqa: E402\n\n\n{self.kernel}\n\n"),
        ):
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text


TOP = Target(
    "top",
    "topk",
    """\
import torch


# mtmc: x=f32[8,40]
def top(x):
    return torch.topk(x, 4, -1).values * 2
""",
    '''\
@triton.jit
def top_kernel(x_ptr, out_ptr, n_cols, K: tl.constexpr, BLOCK: tl.constexpr):
    """The K largest of each row, doubled: the largest is written and taken out, K times. NaN is larger than infinity."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=float("-inf"))
    n_nan = tl.sum((x != x).to(tl.int32), 0)
    left = tl.where(x != x, float("inf"), x)
    taken = cols >= n_cols
    for k in range(K):
        rest = tl.where(taken, float("-inf"), left)
        place = tl.argmax(rest, 0)
        best = tl.where(k < n_nan, float("nan"), tl.max(rest, 0))
        tl.store(out_ptr + row * K + k, best * 2)
        taken = taken | (cols == place)
''',
    """\
    n_rows, n_cols = x.shape
    out = torch.empty((n_rows, 4), dtype=x.dtype, device=x.device)
    top_kernel[(n_rows,)](x, out, n_cols, K=4, BLOCK=triton.next_power_of_2(n_cols), num_warps=4)
    return out
""",
)
MIDDLE = Target(
    "middle",
    "median",
    """\
import torch


# mtmc: x=f32[8,41]
def middle(x):
    return torch.relu(torch.median(x, -1).values)
""",
    '''\
@triton.jit
def middle_kernel(x_ptr, out_ptr, n_cols, BLOCK: tl.constexpr):
    """The lower median of each row, not below zero: the row is sorted in registers. NaN if the row contains NaN."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=float("inf"))
    n_nan = tl.sum((x != x).to(tl.int32), 0)
    ordered = tl.sort(tl.where(x != x, float("inf"), x))
    median = tl.sum(tl.where(cols == (n_cols - 1) // 2, ordered, 0.0), 0)
    tl.store(out_ptr + row, tl.where(n_nan > 0, float("nan"), tl.maximum(median, 0.0)))
''',
    """\
    n_rows, n_cols = x.shape
    out = torch.empty((n_rows,), dtype=x.dtype, device=x.device)
    middle_kernel[(n_rows,)](x, out, n_cols, BLOCK=triton.next_power_of_2(n_cols), num_warps=4)
    return out
""",
)
WEIGHT = Target(
    "weight",
    "scatter_add",
    """\
import torch


# mtmc: x=f32[300] bins=i64[300]@0..15
def weight(x, bins):
    return torch.zeros(16, device=x.device).scatter_add(0, bins, x)
""",
    '''\
@triton.jit
def weight_kernel(x_ptr, bins_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """The sum of all values of one bin, by one program: no atomics, so two runs agree."""
    bin = tl.program_id(0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mine = tl.load(bins_ptr + at, mask=at < n, other=-1) == bin
        total += tl.load(x_ptr + at, mask=mine, other=0.0)
    tl.store(out_ptr + bin, tl.sum(total, 0))
''',
    """\
    out = torch.empty((16,), dtype=x.dtype, device=x.device)
    weight_kernel[(16,)](x, bins, out, bins.numel(), BLOCK=1024, num_warps=4)
    return out
""",
)
BAGS = Target(
    "bags",
    "embedding_bag",
    """\
import torch


# mtmc: table=f32[50,24] ids=i64[64]@0..49 offsets=i64[8]@0..0
def bags(table, ids, offsets):
    return torch.nn.functional.embedding_bag(ids, table, offsets, mode="sum")
""",
    '''\
@triton.jit
def bags_kernel(table_ptr, ids_ptr, offsets_ptr, out_ptr, n_ids, n_bags, n_cols, BLOCK: tl.constexpr):
    """The sum of one bag's rows: a bag ends where the next one begins."""
    bag = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    first = tl.load(offsets_ptr + bag)
    last = tl.load(offsets_ptr + bag + 1, mask=bag + 1 < n_bags, other=n_ids)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in range(first, last):
        row = tl.load(ids_ptr + i)
        total += tl.load(table_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0)
    tl.store(out_ptr + bag.to(tl.int64) * n_cols + cols, total, mask=cols < n_cols)
''',
    """\
    n_bags, n_cols = offsets.numel(), table.shape[1]
    out = torch.empty((n_bags, n_cols), dtype=table.dtype, device=table.device)
    block = triton.next_power_of_2(n_cols)
    bags_kernel[(n_bags,)](table, ids, offsets, out, ids.numel(), n_bags, n_cols, BLOCK=block, num_warps=4)
    return out
""",
)
PLACES = Target(
    "places",
    "searchsorted",
    """\
import torch


# mtmc: edges=i32[32]@-99..99 x=i32[500]@-99..99
def places(edges, x):
    return torch.searchsorted(torch.sort(edges).values, x)
""",
    '''\
@triton.jit
def places_kernel(edges_ptr, x_ptr, out_ptr, n_edges, n, EDGES: tl.constexpr, BLOCK: tl.constexpr):
    """How many edges are below each value, which is its place among them; they need not be sorted for that."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    which = tl.arange(0, EDGES)
    edges = tl.load(edges_ptr + which, mask=which < n_edges, other=0)
    x = tl.load(x_ptr + at, mask=at < n, other=0)
    below = (edges[None, :] < x[:, None]) & (which < n_edges)[None, :]
    tl.store(out_ptr + at, tl.sum(below.to(tl.int64), 1), mask=at < n)
''',
    """\
    n_edges, n = edges.numel(), x.numel()
    out = torch.empty((n,), dtype=torch.int64, device=x.device)
    places_kernel[(triton.cdiv(n, 128),)](edges, x, out, n_edges, n, EDGES=triton.next_power_of_2(n_edges), BLOCK=128)
    return out
""",
)
TARGETS = (TOP, MIDDLE, WEIGHT, BAGS, PLACES)
