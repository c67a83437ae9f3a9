"""Programs that the interpreter runs at once store what they store one after the other; those that depend on others do not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAD = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
import torch
from mtmc_lsp.verify.messages import GridOrder
from mtmc_lsp.verify.worker.interpreter import batches, grids, prepare_interpreter
prepare_interpreter()
import triton, triton.language as tl
from triton.language.extra import libdevice


def one_by_one(run):
    before, grids.FEWEST_AT_ONCE = grids.FEWEST_AT_ONCE, sys.maxsize
    try:
        return run()
    finally:
        grids.FEWEST_AT_ONCE = before


def known(kernel):
    return [value for key, value in batches._known.items() if key[0].__name__ == kernel.fn.__name__]
"""
KERNELS = (
    HEAD
    + """
@triton.jit
def helper(x, y):
    return x * y + 1


@triton.jit
def elementwise(x_ptr, y_ptr, out_ptr, n, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.5).to(tl.float32)
    y = tl.load(y_ptr + at, mask=at < n).to(tl.float32)
    value = tl.where(x > 0, tl.exp(-x), tl.maximum(x, y)) * scale + tl.math.erf(y) + tl.fma(x, y, x) + libdevice.tanh(y)
    value += (at % 3 - at // 7 + (at << 1)).to(tl.float32) + helper(x, y) + tl.abs(y) + tl.rsqrt(tl.abs(x) + 1)
    tl.store(out_ptr + at, value, mask=at < n)


@triton.jit
def rows(x_ptr, y_ptr, out_ptr, n, scale, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * 40 + at, mask=at < 40, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=0))
    total, first = tl.sum(e, axis=0), tl.argmax(x, axis=0)
    running, shape = tl.cumsum(e, axis=0), tl.reshape(e, (8, BLOCK // 8))
    columns = tl.sum(tl.trans(shape), axis=1)
    halves = tl.sum(tl.reshape(tl.join(e, running), (2 * BLOCK,)), axis=0)
    largest = tl.max(columns, axis=0) + tl.sum(shape[:, None, :] * shape[None, :, :])
    tl.store(out_ptr + row * 40 + at, e / total + running * scale + first + halves + largest, mask=at < 40)


@triton.jit
def product(x_ptr, y_ptr, out_ptr, n, scale, BLOCK: tl.constexpr):
    m, k = tl.program_id(0) * 16 + tl.arange(0, 16), tl.arange(0, 16)
    columns = tl.program_id(1) * 16 + tl.arange(0, 16)
    total = tl.zeros((16, 16), tl.float32)
    for start in range(0, tl.cdiv(40, 16)):
        at = start * 16 + k
        x = tl.load(x_ptr + m[:, None] * 40 + at[None, :], mask=(m[:, None] < 25) & (at[None, :] < 40), other=0.0)
        y = tl.load(y_ptr + at[:, None] * 25 + columns[None, :], mask=(at[:, None] < 40) & (columns[None, :] < 25), other=0.0)
        total = tl.dot(x, y, total)
    inside = (m[:, None] < 25) & (columns[None, :] < 25)
    tl.store(out_ptr + m[:, None] * 25 + columns[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def in_place(x_ptr, y_ptr, out_ptr, n, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)
    value = tl.load(out_ptr + at, mask=at < n)
    tl.store(out_ptr + at, value + value, mask=at < n)


@triton.jit
def persistent(x_ptr, y_ptr, out_ptr, n, scale, BLOCK: tl.constexpr):
    for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n, other=0.0), mask=at < n)


@triton.jit
def two_kinds(x_ptr, y_ptr, out_ptr, n, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    if tl.program_id(0) < 20:
        x = x + x
    tl.store(out_ptr + at, x, mask=at < n)


GRIDS = {elementwise: (32, 1), rows: (25, 1), product: (2, 2), in_place: (32, 1), persistent: (9, 1), two_kinds: (32, 1)}
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
    torch.manual_seed(0)
    x, y = torch.randn(1000).to(dtype), torch.randn(1000).to(dtype)
    x[::7] = 0.0
    for kernel, grid in GRIDS.items():
        if kernel is product and dtype is torch.float64:
            continue
        def run():
            out = torch.full((1000,), float("nan"), dtype=dtype)
            kernel[grid](x, y, out, 1000, 0.3, BLOCK=64 if kernel is rows else 32)
            return out
        expected = one_by_one(run)
        assert expected[:600].isfinite().all(), (kernel, dtype)
        for order in GridOrder:
            with grids.in_order(order, 5):
                result = run()
            assert torch.equal(result.nan_to_num(9.0), expected.nan_to_num(9.0)), (kernel.fn.__name__, dtype, order, result, expected)
for kernel in GRIDS:
    # The loops of persistent programs begin at different numbers.
    is_fit = all(value.is_fit and value.largest for value in known(kernel))
    assert is_fit == (kernel is not persistent), kernel.fn.__name__


@triton.jit
def differences(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, others = tl.load(x_ptr + at), tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(out_ptr + at, tl.sum(tl.abs(x[:, None] - others[None, :]), axis=1))


x, out = torch.randn(512), torch.zeros(512)
differences[(8,)](x, out, BLOCK=64)
assert torch.allclose(out, (x[:, None] - x[None, :64]).abs().sum(1), rtol=1e-5)
# A tile that is neither loaded nor stored counts.
assert [value.largest for value in known(differences)] == [64 * 64 // 8]
print("the same")
"""
)
DEPENDENT = (
    HEAD
    + """
@triton.jit
def next_block(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at + BLOCK, mask=at + BLOCK < n), mask=at + BLOCK < n)


@triton.jit
def one_place(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, 1), tl.program_id(0).to(tl.float32) + tl.zeros((1,), tl.float32))


@triton.jit
def counted(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n) + 1, mask=at < n)
    tl.atomic_add(x_ptr + n - 1 + tl.program_id(0) * 0, 1.0)


@triton.jit
def overlapping(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * (BLOCK // 2) + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n) * 2, mask=at < n)


for kernel in (next_block, one_place, counted, overlapping):
    results = []
    for order in (GridOrder.USUAL, GridOrder.REVERSED):
        def run():
            x = torch.arange(256.0)
            kernel[(8,)](x, 256, BLOCK=16)
            return x
        with grids.in_order(order, 0):
            expected = one_by_one(run)
            assert torch.equal(run(), expected) and torch.equal(run(), expected), (kernel.fn.__name__, order)
        results.append(expected)
    assert not all(value.is_fit for value in known(kernel))
    assert kernel in (counted, overlapping) or not torch.equal(*results)


@triton.jit
def sums(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + tl.program_id(0) + tl.arange(0, BLOCK) * 0, tl.cumsum(tl.load(x_ptr + at), 0))


@triton.jit
def equal_sums(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + tl.program_id(0) + tl.arange(0, BLOCK) * 0, tl.sum(tl.load(x_ptr + at), 0) + at * 0.0)


@triton.jit
def sums_in_two(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    sums = tl.cumsum(tl.load(x_ptr + tl.program_id(0) * BLOCK + at), 0)
    tl.store(tl.where(at < 2, x_ptr + 8192, out_ptr + tl.program_id(0)), sums)


x = torch.ones(8193)
for kernel in (sums, equal_sums, sums_in_two):
    for count in (1, 512):
        last = []
        for order in GridOrder:
            out = torch.zeros(count)
            with grids.in_order(order, 3):
                kernel[(count,)](x, out, BLOCK=16)
            last.append(bool((out == 16).all()))
        assert last[0] and all(last[1:]) == (kernel is equal_sums) and (any(last[1:]) == all(last[1:]) or count == 1), last


@triton.jit
def shifted(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


for order in GridOrder:
    def run():
        x = torch.arange(256.0)
        shifted[(16,)](x, torch.from_dlpack(x[1:]), 255, BLOCK=16)
        return x
    with grids.in_order(order, 0):
        assert torch.equal(run(), one_by_one(run)), order
assert not all(value.is_fit for value in known(shifted))


@triton.jit
def refuses(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, at * 1.0)
    if tl.program_id(0) == 5:
        tl.store(x_ptr + tl.arange(0, 3), 0.0)


x = torch.zeros(256)
try:
    refuses[(8,)](x, 256, BLOCK=16)
except Exception as error:
    assert "power of 2" in str(error)
else:
    raise AssertionError("no error")
assert x[95] == 95 and not x[96:].any(), x
print("as one by one")
"""
)
LOADED_LATER = (
    HEAD
    + """
@triton.jit
def loads_later(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, at * 1.0, mask=at < n)
    # The first program loads nothing that it stores.
    value = tl.load(x_ptr + at, mask=(at < n) & (at >= BLOCK), other=0.0)
    tl.store(x_ptr + at, value + 1.0, mask=at < n)


compare, compared = batches.Batches._compare, []
batches.Batches._compare = lambda self, stored: (compared.append(len(stored)), compare(self, stored))
x = torch.zeros(256)
loads_later[(8,)](x, 128, BLOCK=16)
expected = torch.arange(128.0) + 1.0
expected[:16] = 1.0
assert torch.equal(x[:128], expected), x
assert all(value.is_fit and value.records_loads for value in known(loads_later))
assert compared == [2], compared
print("compared once")
"""
)
OVERLAPPING = (
    HEAD
    + """
import numpy


@triton.jit
def copies(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at))


def run():
    # Two storages in the same memory: each program loads the last element that the program before stores.
    array = numpy.arange(129, dtype=numpy.float32)
    copies[(8,)](torch.from_numpy(array[:-1]), torch.from_numpy(array[1:]), BLOCK=16)
    return torch.from_numpy(array)


expected = one_by_one(run)
assert not torch.equal(expected[1:], torch.arange(128.0))
# After a launch of separate tensors, no program runs alone first.
copies[(8,)](torch.arange(128.0), torch.zeros(128), BLOCK=16)
assert all(value.is_fit and value.largest for value in known(copies))
assert torch.equal(run(), expected), (run(), expected)
print("one memory")
"""
)

RACES = (
    HEAD
    + """
from mtmc_lsp.verify.worker.interpreter.lane_operations import programs

grids.current.refuses_races = True


@triton.jit
def neighbours(x_ptr, scratch_ptr, WAITS: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0) * BLOCK, tl.arange(0, BLOCK)
    tl.store(scratch_ptr + row + at, tl.load(x_ptr + row + at))
    if WAITS:
        tl.debug_barrier()
    tl.store(x_ptr + row + at, tl.load(scratch_ptr + row + (at + 1) % BLOCK))


def run(waits):
    x = torch.arange(256.0)
    neighbours[(16,)](x, torch.zeros(256), waits, BLOCK=16)
    return x


expected = torch.arange(256.0).reshape(16, 16).roll(-1, 1).reshape(-1)
for order in GridOrder:
    with grids.in_order(order, 3):
        assert torch.equal(one_by_one(lambda: run(True)), expected), order
        assert torch.equal(run(True), expected), order
assert not programs.faults and all(value.is_fit and value.largest for value in known(neighbours))
for order in GridOrder:
    for way in (one_by_one, lambda run: run()):
        try:
            with grids.in_order(order, 3):
                way(lambda: run(False))
        except Exception as error:
            assert "a load of neighbours" in str(error), error
        else:
            raise AssertionError(order)
assert len(set(programs.faults)) == 1 and len(programs.faults) >= 8, programs.faults
print("refused in both")
"""
)
EMPTY = (
    HEAD
    + """
@triton.jit
def ones(out_ptr):
    tl.store(out_ptr + tl.program_id(0), 1.0)


out = torch.zeros(4)
for grid in ((0,), (2, 0), (2, 2, 0)):
    ones[grid](out)
print("nothing ran" if not out.any() else out)
"""
)


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        (KERNELS, "the same"),
        (EMPTY, "nothing ran"),
        (RACES, "refused in both"),
        (DEPENDENT, "as one by one"),
        (LOADED_LATER, "compared once"),
        (OVERLAPPING, "one memory"),
    ],
)
def test_programs_at_once_store_what_they_store_one_by_one(program: str, printed: str, tmp_path: Path) -> None:
    """In all orders and dtypes; programs that depend on others run in their order, and an error leaves what came before."""
    file = tmp_path / "programs.py"
    file.write_text(program)
    root = Path(__file__).resolve().parents[2]
    seen = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=800, cwd=root)
    assert printed in seen.stdout, seen.stderr[-3000:]
