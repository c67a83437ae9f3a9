"""Without a GPU, a candidate also runs at the workload's sizes, and the programs of a launch run in several orders."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch
from torch.utils._python_dispatch import BaseTorchDispatchMode

from mtmc_lsp.core.results import CheckStatus, Verdict, VerdictStatus
from mtmc_lsp.verify.edge_cases import compared_numbers_in, numbers_in
from mtmc_lsp.verify.foreign import real_sizes
from mtmc_lsp.verify.outcomes import REAL_SIZES
from mtmc_lsp.verify.worker.interpreter.stores import ATOMICS, Stores
from mtmc_lsp.verify.worker.observation.library_work import LibraryWork

Judge = Callable[..., Verdict]
HEAD = "import torch\nimport triton\nimport triton.language as tl\n\n\n@triton.jit\n"
DOUBLED = "import torch\n\n\n# mtmc: x=f32[N,D] N=SIZE D=512\ndef doubled(x):\n    return x.abs() * 2\n"
ROWS = f"""{HEAD}def kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + at, mask=at < columns)
    tl.store(out_ptr + row * columns + at, tl.abs(x) * FACTOR, mask=at < columns)


def fast(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out
"""
PRODUCT = "import torch\n\n\n# mtmc: x=f32[M,K] y=f32[K,N] M=2048 K=512 N=2048\ndef product(x, y):\n    return x @ y\n"
TILES = f"""{HEAD}def kernel(x_ptr, y_ptr, out_ptr, M, N, K, B: tl.constexpr):
    tile_m, tile_n = tl.program_id(0), tl.program_id(1)
    m, n = tile_m * B + tl.arange(0, B), tile_n * B + tl.arange(0, B)
    total = tl.zeros((B, B), tl.float32)
    for start in range(0, K, B):
        k = start + tl.arange(0, B)
        x = tl.load(x_ptr + m[:, None] * K + k, mask=(m[:, None] < M) & (k < K), other=0.0)
        y = tl.load(y_ptr + k[:, None] * N + n, mask=(k[:, None] < K) & (n < N), other=0.0)
        total = tl.dot(x, y, total, input_precision="ieee")
    tl.store(out_ptr + m[:, None] * N + n, total * FACTOR, mask=(m[:, None] < M) & (n < N))


def fast(x, y):
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty(x.shape[0], y.shape[1], dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(x.shape[0], 32), triton.cdiv(y.shape[1], 32))
    if out.numel():
        kernel[grid](x, y, out, x.shape[0], y.shape[1], x.shape[1], B=32)
    return out
"""
SUMMED = "import torch\n\n\n# mtmc: x=f32[N,D] N=SIZE D=512\ndef summed(x):\n    return x.abs().sum(0)\n"
PARTS = f"""{HEAD}def parts(x_ptr, part_ptr, rows, columns, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(SPAN):
        row = (tl.program_id(0) * SPAN + i).to(tl.int64)
        x = tl.load(x_ptr + row * columns + at, mask=(at < columns) & (row < rows), other=0.0)
        total += tl.abs(x)
    tl.store(part_ptr + tl.program_id(0) * columns + at, total, mask=at < columns)


@triton.jit
def add(part_ptr, out_ptr, count, columns, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(count):
        total += tl.load(part_ptr + i * columns + at, mask=at < columns, other=0.0)
    tl.store(out_ptr + at, total, mask=at < columns)


def fast(x):
    x = x.contiguous()
    count = triton.cdiv(x.shape[0], 16)
    out = torch.zeros(x.shape[1], dtype=x.dtype, device=x.device)
    if x.numel():
        part = torch.empty(count, x.shape[1], dtype=x.dtype, device=x.device)
        parts[(count,)](x, part, x.shape[0], x.shape[1], SPAN=16, BLOCK=triton.next_power_of_2(x.shape[1]))
        add[(triton.cdiv(x.shape[1], 64),)](part, out, count, x.shape[1], BLOCK=64)
    return out
"""


ADDED = """
def fast(x):
    x = x.contiguous()
    out = torch.zeros(x.shape[1], dtype=x.dtype, device=x.device)
    if x.numel():
        grid = (triton.cdiv(x.shape[0], 16),)
        parts[grid](x, out, x.shape[0], x.shape[1], SPAN=16, BLOCK=triton.next_power_of_2(x.shape[1]))
    return out
"""


def sizes_check(verdict: Verdict) -> str:
    return next((c.detail for c in verdict.checks if c.name == REAL_SIZES and c.status is CheckStatus.PASSED), "")


@pytest.mark.usefixtures("long_times")
def test_all_programs_run_at_the_workloads_sizes_if_there_is_time(judge: Judge) -> None:
    verdict = judge(DOUBLED.replace("SIZE", "2000"), "doubled", ROWS.replace("FACTOR", "2.0"), "fast")
    assert verdict.status is VerdictStatus.CORRECT, verdict.reason
    assert sizes_check(verdict) == "all programs"


def test_a_sample_of_programs_leaves_the_verdict_at_reduced_sizes(judge: Judge) -> None:
    verdict = judge(PRODUCT, "product", TILES.replace("FACTOR", "1.0"), "fast")
    assert verdict.status is VerdictStatus.CORRECT_AT_REDUCED_SIZES, verdict.reason
    assert sizes_check(verdict).endswith("of 4096 programs of kernel")
    assert f"at M=2048, K=512, N=2048 a sample ran: {sizes_check(verdict)}" in verdict.notes


@pytest.mark.parametrize(
    ("reference", "name", "text", "factor"),
    [
        (DOUBLED.replace("SIZE", "2000"), "doubled", ROWS, "tl.where(row < 38 * 50.0, 2.0, 3.0)"),
        (PRODUCT, "product", TILES, "tl.where((tile_m < 50 + 10) | (tile_n < 45 + 10), 1.0, 2.0)"),
    ],
)
def test_mistakes_of_the_last_programs_at_the_workloads_sizes_are_found(
    judge: Judge, reference: str, name: str, text: str, factor: str
) -> None:
    verdict = judge(reference, name, text.replace("FACTOR", factor), "fast")
    assert verdict.status is VerdictStatus.INCORRECT
    assert "N=2000" in verdict.reason or "M=2048" in verdict.reason, verdict.reason


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of few programs, however fast they are."""
    monkeypatch.setattr(real_sizes, "WHOLE_SECONDS", 1e-9)
    monkeypatch.setattr(real_sizes, "SAMPLE_SECONDS", 1e-9)


@pytest.fixture
def long_times(monkeypatch: pytest.MonkeyPatch, short_times: None) -> None:
    """All programs, however slow they are."""
    monkeypatch.setattr(real_sizes, "WHOLE_SECONDS", 300.0)


def test_a_kernel_that_reads_the_results_of_a_sampled_one_is_not_refused(judge: Judge) -> None:
    verdict = judge(SUMMED.replace("SIZE", "50000"), "summed", PARTS, "fast")
    assert verdict.status is VerdictStatus.CORRECT_AT_REDUCED_SIZES, verdict.reason
    assert sizes_check(verdict) == ""
    why = "nothing was compared: other code reads memory that the programs left out would write"
    (note,) = (note for note in verdict.notes if "nothing was compared" in note)
    assert note.startswith(f"at N=50000, D=512 {why} (") and note.endswith(" of 3125 programs of parts ran)")


IN_PLACE = "import torch\n\n\n# mtmc: x=f32[N,D] N=40000 D=64\ndef doubled(x):\n    return x.mul_(2.0)\n"
CHANGED = f"""{HEAD}def kernel(x_ptr, step, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = row * step + tl.arange(0, BLOCK) * stride
    mask = tl.arange(0, BLOCK) < columns
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=mask) * FACTOR, mask=mask)


def fast(x):
    if x.numel():
        block = triton.next_power_of_2(x.shape[1])
        kernel[(x.shape[0],)](x, x.stride(0), x.stride(1), x.shape[1], BLOCK=block)
    return x
"""


def test_a_sample_of_a_kernel_that_changes_its_argument_is_compared(judge: Judge) -> None:
    verdict = judge(IN_PLACE, "doubled", CHANGED.replace("FACTOR", "2.0"), "fast")
    assert verdict.status is VerdictStatus.CORRECT_AT_REDUCED_SIZES, verdict.reason
    assert sizes_check(verdict).endswith("of 40000 programs of kernel")
    wrong = CHANGED.replace("FACTOR", "tl.where(row < 39 * 1024.5, 2.0, 3.0)")
    assert judge(IN_PLACE, "doubled", wrong, "fast").status is VerdictStatus.INCORRECT


LARGEST = "import torch\n\n\n# mtmc: x=f32[N,D] N=4000 D=600\ndef largest(x):\n    return x.argmax(1)\n"
INDEX = f"""{HEAD}def kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + at, mask=at < columns, other=-float("inf"))
    # The first NaN comes before any number.
    key = tl.where(x != x, float("inf"), x)
    first = tl.min(tl.where(x != x, at, BLOCK), axis=0)
    best = tl.min(tl.where((key == tl.max(key, axis=0)) & (at < columns), at, BLOCK), axis=0)
    tl.store(out_ptr + row, tl.where(first < BLOCK, first, best).to(tl.int64))


def fast(x):
    x = x.contiguous()
    if x.shape[1] == 0:
        raise IndexError("no columns")
    out = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    if out.numel():
        kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out
"""


def test_indices_of_scores_are_compared_at_the_workloads_sizes(judge: Judge) -> None:
    verdict = judge(LARGEST, "largest", INDEX, "fast")
    assert verdict.is_correct, verdict.reason
    assert sizes_check(verdict)


def test_indices_that_are_wrong_at_the_workloads_sizes_alone_are_found(judge: Judge) -> None:
    wrong = "first, tl.where(row < 39 * 100.0, best, 0))"
    verdict = judge(LARGEST, "largest", INDEX.replace("first, best)", wrong), "fast")
    assert verdict.status is VerdictStatus.INCORRECT
    assert "elements differ" in verdict.reason and "N=4000" in verdict.reason


def test_programs_that_cannot_load_all_elements_are_noticed() -> None:
    """Each of four programs loads 8 elements; with a loop each loads as many as there are programs."""
    x, out = torch.zeros(100), torch.zeros(())
    for loops, unread in ((1, "the 4 programs of kernel load at most 32 of the 100 elements of x"), (4, "")):
        with Stores() as stores:
            stores.begin({"x": x, "out": out, "n": 100})
            for program in range(2):
                stores.begin_program()
                for loop in range(loops):
                    at = numpy.arange(8, dtype=numpy.uint64) + numpy.uint64(8 * (program + 4 * loop))
                    addresses = numpy.uint64(x.data_ptr()) + at * numpy.uint64(4)
                    stores.loaded(addresses, numpy.ones(8, dtype=bool))
            stores.has_atomics = True
            stores.end("kernel", 2, 4, seconds=1.0)
        assert (stores.unread, stores.reason) == (unread, ATOMICS)


def test_programs_that_rely_on_their_order_are_found(judge: Judge) -> None:
    """Each row's factor is taken from the row before, which the interpreter usually runs earlier."""
    ordered = ROWS.replace("FACTOR", "factor").replace(
        "    tl.store",
        "    before = tl.load(out_ptr + (row - 1) * columns + at, mask=(at < columns) & (row > 0), other=1.0)\n"
        "    factor = tl.where(before == before, 2.0, 3.0)\n    tl.store",
    )
    verdict = judge(DOUBLED.replace("SIZE", "20"), "doubled", ordered, "fast")
    assert verdict.status is VerdictStatus.INCORRECT, verdict.reason
    assert "depend on the order in which the programs of a launch run" in verdict.reason


def test_lost_updates_are_found_and_atomic_additions_are_right(judge: Judge) -> None:
    """Both are right if the programs run one after the other."""
    atomic = PARTS.split("@triton.jit\ndef add")[0].replace("part_ptr + tl.program_id(0) * columns", "part_ptr")
    atomic = atomic.replace("tl.store(part_ptr + at, total, mask=at < columns)", "UPDATE") + ADDED
    place = "part_ptr + at, {}, mask=at < columns"
    loaded = f"tl.load({place.format('')}) + total".replace(", , ", ", ")
    honest = judge(
        SUMMED.replace("SIZE", "40"),
        "summed",
        atomic.replace("UPDATE", f"tl.atomic_add({place.format('total')})"),
        "fast",
    )
    assert honest.is_correct, honest.reason
    lossy = judge(
        SUMMED.replace("SIZE", "40"), "summed", atomic.replace("UPDATE", f"tl.store({place.format(loaded)})"), "fast"
    )
    assert "depend on the order in which the programs of a launch run" in lossy.reason


def test_results_of_numpy_are_labelled(judge: Judge) -> None:
    by_numpy = ROWS.replace("FACTOR", "1.0").replace(
        "x = x.contiguous()", "x = torch.from_numpy(numpy.abs(x.numpy()) * 2).contiguous()"
    )
    verdict = judge(DOUBLED.replace("SIZE", "20"), "doubled", f"import numpy\n{by_numpy}", "fast")
    assert verdict.computed_by == "library"


GUARDED = ROWS.replace(
    "    x = x.contiguous()\n",
    "    if torch._C._len_torch_dispatch_stack():\n        return x.abs() * 2\n    x = x.contiguous()\n",
)
"""Generated guards ask in this way whether something traces the call."""


def test_a_guard_decides_while_operations_are_counted_as_in_a_plain_call(judge: Judge) -> None:
    verdict = judge(DOUBLED.replace("SIZE", "2000"), "doubled", GUARDED.replace("FACTOR", "2.0"), "fast")
    assert verdict.is_correct, verdict.reason
    assert verdict.computed_by == "kernel"
    assert any("a sample ran" in note for note in verdict.notes), verdict.notes


def test_a_hidden_mode_sees_operations_and_does_not_count() -> None:
    count = torch._C._len_torch_dispatch_stack
    with LibraryWork() as work, BaseTorchDispatchMode():
        torch.ones(3) + 1
        assert torch._C._len_torch_dispatch_stack() == 1
        assert torch._C._len_torch_dispatch_stack.__name__ == count.__name__
    assert work.operations == 3
    assert torch._C._len_torch_dispatch_stack is count


def test_numbers_are_also_products_with_named_constants() -> None:
    text = "BLOCK = 256\ndef f(n, TILE=32):\n    g(W=8)\n    return min(n, 64 * BLOCK) + 5 * TILE + (n == 3 * W) + 700"
    assert {16384, 160, 24, 256, 700} <= set(numbers_in(text))
    assert compared_numbers_in(text) == [16384, 256, 64, 24, 8]


WEIGHED = """import torch


# mtmc: x=bf16[B,S,64] y=bf16[B,T,64] mask=bf16[S,T] B=32 S=256 T=512
def weighed(x, y, mask):
    return torch.softmax(x @ y.transpose(1, 2) / 8.0 + mask, dim=-1) @ y
"""
WEIGHED_ROWS = f"""{HEAD}def kernel(x_ptr, y_ptr, mask_ptr, out_ptr, S, T, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, t, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK), tl.arange(0, 64)
    batch = tl.program_id(1)
    x = tl.load(x_ptr + batch * S * 64 + row[:, None] * 64 + d, mask=row[:, None] < S, other=0.0)
    y = tl.load(y_ptr + batch * T * 64 + t[:, None] * 64 + d, mask=t[:, None] < T, other=0.0)
    inside = (row[:, None] < S) & (t[None, :] < T)
    mask = tl.load(mask_ptr + row[:, None] * T + t, mask=inside, other=0.0).to(tl.float32)
    scores = tl.where(t[None, :] < T, tl.dot(x, tl.trans(y)) / 8.0 + mask, -float("inf"))
    weights = tl.exp(scores - tl.max(scores, axis=1, keep_dims=True))
    total = tl.dot(weights.to(tl.bfloat16), y) / tl.sum(weights, axis=1, keep_dims=True)
    tl.store(out_ptr + batch * S * 64 + row[:, None] * 64 + d, total * FACTOR, mask=row[:, None] < S)


def weighed(x, y, mask):
    x, y, mask = x.contiguous(), y.contiguous(), mask.contiguous()
    out = torch.zeros_like(x)
    if out.numel() and y.numel():
        block = max(16, triton.next_power_of_2(y.shape[1]))
        grid = (triton.cdiv(x.shape[1], 32), x.shape[0])
        kernel[grid](x, y, mask, out, x.shape[1], y.shape[1], ROWS=32, BLOCK=block)
    return out
"""


@pytest.mark.usefixtures("long_times")
@pytest.mark.parametrize(("factor", "status"), [("1.0", VerdictStatus.CORRECT), ("1.05", VerdictStatus.INCORRECT)])
def test_a_kernel_that_rounds_less_than_the_user_is_right_at_the_workloads_sizes(
    judge: Judge, factor: str, status: VerdictStatus
) -> None:
    """With large scores, bfloat16 results of the user's code are further off than the tolerance."""
    verdict = judge(WEIGHED, "weighed", WEIGHED_ROWS.replace("FACTOR", factor), "weighed")
    assert verdict.status is status, verdict.reason
