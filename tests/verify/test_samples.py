"""Cases with many programs: a sample of them runs, in the order of the case, unless its results cannot be compared."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from mtmc_lsp.core.results import Verdict, VerdictStatus
from mtmc_lsp.verify import engine
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.foreign import samples
from mtmc_lsp.verify.foreign.samples import SECONDS, Samples
from mtmc_lsp.verify.messages import CallPlan, GridOrder
from mtmc_lsp.verify.outcomes import CaseOutcome
from mtmc_lsp.verify.worker.interpreter import grids
from mtmc_lsp.verify.worker.interpreter.stores import Stores

Judge = Callable[..., Verdict]
Run = Callable[..., list[int]]
NOTE = "ran a sample of the programs in"
HEAD = "import torch\nimport triton\nimport triton.language as tl\n\nLIMIT = 2000\n\n\n@triton.jit\n"
DOUBLED = "import torch\n\n\n# mtmc: x=f32[N,D] N=1000 D=64\ndef doubled(x):\n    return x.abs() * 2\n"
LARGEST = "import torch\n\n\n# mtmc: x=f32[N,D] N=1000 D=64\ndef largest(x):\n    return x.abs().amax(0)\n"
ROWS = f"""{HEAD}def kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + at, mask=at < columns)
    tl.store(out_ptr + row * columns + at, tl.abs(x) * FACTOR, mask=at < columns)


def fast(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel() and x.shape[0] > LIMIT:
        kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    elif x.numel():
        kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=max(16, triton.next_power_of_2(x.shape[1])))
    return out
"""
PARTS = f"""{HEAD}def parts(x_ptr, part_ptr, rows, columns, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + row * columns + at, mask=(at < columns) & (row < LAST), other=0.0)
    WRITE(part_ptr + PLACE + at, tl.abs(x), mask=at < columns)


def fast(x):
    x = x.contiguous()
    rows, columns = x.shape
    if not x.numel():
        return x.abs().amax(0)
    part = torch.zeros(COUNT, columns, dtype=x.dtype, device=x.device)
    if rows > LIMIT:
        parts[(rows,)](x, part, rows, columns, BLOCK=triton.next_power_of_2(columns))
    else:
        parts[(rows,)](x, part, rows, columns, BLOCK=max(16, triton.next_power_of_2(columns)))
    return part.amax(0)
"""
STORED = PARTS.replace("WRITE", "tl.store").replace("PLACE", "row * columns").replace("COUNT", "rows")
MAXIMA = PARTS.replace("WRITE", "tl.atomic_max").replace("PLACE", "0").replace("COUNT", "1")


@pytest.fixture
def little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thousand programs take too long."""
    monkeypatch.setattr(engine, "Samples", functools.partial(Samples, seconds=0.1))
    monkeypatch.setattr(samples, "SAMPLE_SECONDS", 0.02)


@pytest.mark.usefixtures("little_time")
def test_a_sample_of_many_rows_is_noted(judge: Judge) -> None:
    verdict = judge(DOUBLED, "doubled", ROWS.replace("FACTOR", "2.0"), "fast")
    assert verdict.status is VerdictStatus.CORRECT, verdict.reason
    assert any(NOTE in note and "of 4001 programs of kernel (N=4001, D=3)" in note for note in verdict.notes)


@pytest.mark.usefixtures("little_time")
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param("row == 125 * 16", id="the last program"),
        pytest.param("(row > 12 * 100) & (row < 13 * 100)", id="some in the middle"),
        pytest.param("row == (1 << 10)", id="at a power of two"),
    ],
)
def test_mistakes_of_few_programs_are_found_in_a_sample(judge: Judge, wrong: str) -> None:
    verdict = judge(DOUBLED, "doubled", ROWS.replace("FACTOR", f"tl.where({wrong}, 3.0, 2.0)"), "fast")
    assert verdict.status is VerdictStatus.INCORRECT
    assert verdict.reason.startswith("result 0 values"), verdict.reason


@pytest.mark.usefixtures("little_time")
@pytest.mark.parametrize("text", [pytest.param(STORED, id="read later"), pytest.param(MAXIMA, id="atomic maxima")])
def test_all_programs_run_if_a_sample_cannot_be_compared(judge: Judge, text: str) -> None:
    honest = judge(LARGEST, "largest", text.replace("LAST", "rows"), "fast")
    assert honest.status is VerdictStatus.CORRECT, honest.reason
    assert not any(NOTE in note for note in honest.notes)
    wrong = judge(LARGEST, "largest", text.replace("LAST", "tl.where(rows > 20 * 100, 99, rows)"), "fast")
    assert wrong.status is VerdictStatus.INCORRECT
    assert "N=2001" in wrong.reason, wrong.reason


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a grid whose programs take a hundredth of a second each by a clock of the test."""
    seconds = 0.0
    monkeypatch.setattr(grids, "process_time", lambda: seconds)
    monkeypatch.setattr(Stores, "may_be_complete", lambda *_: True)

    def ran(total: int, order: GridOrder, *, atomic: bool = False, must_compare: bool = True) -> list[int]:
        numbers: list[int] = []

        def program(number: int) -> None:
            nonlocal seconds
            seconds += 0.01
            numbers.append(number)

        with (
            grids.in_order(order, 7),
            grids.sampled(0.5, 1.0, must_compare=must_compare) as stores,
        ):
            stores.has_atomics = atomic
            assert grids._run_sample(grids._one_by_one(program), total, stores) == len(numbers)
        return numbers

    return ran


@pytest.mark.parametrize("order", GridOrder)
def test_short_grids_run_whole_and_in_their_order(run: Run, order: GridOrder) -> None:
    numbers = run(100, order)
    assert sorted(numbers) == list(range(100))
    assert (numbers == list(range(99, -1, -1))) == (order is GridOrder.REVERSED)


@pytest.mark.parametrize("order", GridOrder)
def test_a_sample_has_the_ends_and_powers_of_two_in_the_order(run: Run, order: GridOrder) -> None:
    numbers = run(5000, order)
    assert len(numbers) == len(set(numbers)) < 120
    assert {0, 3, 31, 32, 33, 4095, 4096, 4097, 4996, 4999} <= set(numbers)
    later = numbers[8:]
    is_sorted = later == sorted(later), later == sorted(later, reverse=True)
    assert is_sorted == (order is GridOrder.USUAL, order is GridOrder.REVERSED)


def test_atomic_programs_run_whole_only_if_they_must_be_compared(run: Run) -> None:
    assert len(run(5000, GridOrder.USUAL, atomic=True)) == 5000
    assert len(run(5000, GridOrder.USUAL, atomic=True, must_compare=False)) < 120


def test_the_time_for_whole_grids_shrinks_with_what_was_used() -> None:
    left, case = Samples(), Case({}, "normal", 0)
    allowed = [left.plan(CallPlan(), 10_000).whole_seconds]
    for seconds in (SECONDS / 2, SECONDS):
        left.record(CaseOutcome(case, VerdictStatus.CORRECT, program_seconds=seconds))
        allowed.append(left.plan(CallPlan(), 10_000).whole_seconds)
    assert allowed[0] == 2 * allowed[1] > allowed[2] > 0.0
    assert not left.plan(CallPlan(repeats=1), 10_000).sample_seconds
    assert not left.plan(CallPlan(), 100).sample_seconds
    left.record(CaseOutcome(case, VerdictStatus.CORRECT, needs_all_programs=True))
    assert not left.plan(CallPlan(), 10_000).sample_seconds
