"""What the observation of kernels under the interpreter shows."""

from __future__ import annotations

import pytest

from mtmc_lsp.kernels.messages import MOST_STEPS, CaseTrace, FaultKind
from mtmc_lsp.kernels.worker.observer import FIRST_PROGRAMS
from mtmc_lsp.kernels.worker.trace_command import TOO_LONG
from tests.kernels.observing import HEADER, Observing

COPY = (
    HEADER
    + """\
@triton.jit
def copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x, mask=mask)


# mtmc: x=f32[N] N=64
def copy(x):
    out = torch.empty_like(x)
    copy_kernel[(triton.cdiv(x.numel(), 16),)](x, out, x.numel(), BLOCK=16)
    return out
"""
)
LOAD_LINE, STORE_LINE = 10, 11
ROWS = (
    HEADER
    + """\
@triton.jit
def rows_kernel(x_ptr, out_ptr, M, N, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)
    column = tl.program_id(0)
    x = tl.load(x_ptr + rows * N + column, mask=rows < M, other=0.0)
    tl.store(out_ptr + column, tl.sum(x, axis=0))


def rows_reference(x):
    return x.sum(0)


# mtmc: x=f32[M,N] M=8 N=5 reference=rows_reference
def column_sums(x):
    out = torch.empty(x.shape[1])
    rows_kernel[(x.shape[1],)](x, out, x.shape[0], x.shape[1], BLOCK=16)
    return out
"""
)


def kinds(trace: CaseTrace) -> set[FaultKind]:
    return {fault.kind for fault in trace.faults}


def changed(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1
    return text.replace(old, new)


def test_a_sound_kernel_shows_no_fault_at_any_size(observe: Observing) -> None:
    assert [trace.faults for trace in observe(COPY, "copy", {"N": 1}, {"N": 16}, {"N": 33})] == [(), (), ()]


def test_the_bytes_are_those_of_the_active_lanes(observe: Observing) -> None:
    (trace,) = observe(COPY, "copy", {"N": 33})
    load, store = trace.accesses
    assert (load.operation, load.line, load.tensor, load.elements, load.bytes) == ("load", LOAD_LINE, "x_ptr", 33, 132)
    assert (store.operation, store.line, store.tensor, store.bytes) == ("store", STORE_LINE, "out_ptr", 132)
    assert load.is_masked
    assert trace.launches[0].grid == (3, 1, 1)


def test_a_call_that_needs_far_too_many_operations_ends_after_a_few_programs(observe: Observing) -> None:
    (trace,) = observe(COPY, "copy", {"N": 1 << 20})
    assert trace.refusal == TOO_LONG
    assert trace.steps == 2 * FIRST_PROGRAMS
    (trace,) = observe(COPY, "copy", {"N": 2 * MOST_STEPS * 16})
    assert trace.refusal == TOO_LONG and trace.steps > MOST_STEPS, "it is near the limit, so later programs may do less"


def test_a_call_whose_first_programs_do_most_of_the_work_is_observed(observe: Observing) -> None:
    uneven = changed(
        COPY,
        "    x = tl.load(x_ptr + offsets, mask=mask)\n",
        "    for i in range(tl.where(tl.program_id(0) < 8, 100, 1)):\n        x = tl.load(x_ptr + offsets, mask=mask)\n",
    )
    (trace,) = observe(uneven, "copy", {"N": 60 * 16})
    assert not trace.refusal and trace.is_sound
    assert trace.steps == 8 * 101 + 52 * 2


def test_a_sample_of_the_programs_gives_the_work_of_all(observe: Observing) -> None:
    (trace,) = observe(COPY, "copy", {"N": 1 << 20}, most_programs=32)
    assert trace.launches[0].programs == 65536
    assert trace.launches[0].ran <= 32
    assert sum(access.bytes for access in trace.accesses) == 2 * 4 << 20


def test_a_sample_of_millions_of_programs_is_of_the_first_ones(observe: Observing) -> None:
    (trace,) = observe(COPY, "copy", {"N": 1 << 26}, most_programs=32)
    assert (trace.launches[0].programs, trace.launches[0].ran) == (1 << 22, 32)
    assert sum(access.bytes for access in trace.accesses) == 2 * 4 << 26


@pytest.mark.parametrize(
    ("old", "new", "kind", "line"),
    [
        ("x_ptr + offsets, mask=mask", "x_ptr + offsets", FaultKind.READ_OUTSIDE, LOAD_LINE),
        ("out_ptr + offsets, x, mask=mask", "out_ptr + offsets, x", FaultKind.WRITE_OUTSIDE, STORE_LINE),
        ("x_ptr + offsets, mask=mask", "x_ptr + offsets - 1, mask=mask", FaultKind.READ_OUTSIDE, LOAD_LINE),
        ("triton.cdiv(x.numel(), 16)", "x.numel() // 16", FaultKind.NOT_WRITTEN, 0),
        ("tl.program_id(0) * BLOCK", "tl.program_id(0) * BLOCK // 2", FaultKind.RACE, STORE_LINE),
    ],
)
def test_a_wrong_access_is_a_fault_with_its_line(
    observe: Observing, old: str, new: str, kind: FaultKind, line: int
) -> None:
    text = changed(COPY, old, new)
    if kind is FaultKind.RACE:
        # Both halves store, each its own value.
        text = changed(text, "out_ptr + offsets, x, mask", "out_ptr + offsets, x + tl.program_id(0), mask")
    sound, wrong = observe(text, "copy", {"N": 16}, {"N": 33})
    assert kind in kinds(wrong), wrong.faults
    assert line in {fault.line for fault in wrong.faults if fault.kind is kind}
    assert not sound.faults or kind is FaultKind.READ_OUTSIDE


def test_a_fault_says_which_element_of_which_tensor(observe: Observing) -> None:
    (trace,) = observe(changed(COPY, "x_ptr + offsets, mask=mask", "x_ptr + offsets"), "copy", {"N": 33})
    assert trace.faults[0].detail == "it reads element 47 of x_ptr, which has 33"
    assert trace.faults[0].kernel == "copy_kernel"


def test_lanes_without_a_value_are_a_fault_only_if_the_result_depends_on_them(observe: Observing) -> None:
    assert observe(COPY, "copy", {"N": 5})[0].is_sound
    (trace,) = observe(changed(ROWS, ", other=0.0", ""), "column_sums", {"M": 5, "N": 3})
    assert kinds(trace) == {FaultKind.UNDEFINED_LANES}
    assert {fault.line for fault in trace.faults} == {10}


def test_columns_are_strided_and_a_total_is_a_scalar(observe: Observing) -> None:
    (trace,) = observe(ROWS, "column_sums", {"M": 8, "N": 5})
    assert trace.is_sound
    assert [access.pattern for access in trace.accesses] == ["strided", "scalar"]


def test_a_wrong_result_is_compared_with_the_reference(observe: Observing) -> None:
    sound, wrong = observe(changed(ROWS, "other=0.0", "other=1.0"), "column_sums", {"M": 16, "N": 3}, {"M": 5, "N": 3})
    assert sound.is_sound
    assert kinds(wrong) == {FaultKind.WRONG_VALUES}


def test_adding_to_memory_that_nothing_wrote_is_a_fault(observe: Observing) -> None:
    text = changed(ROWS, "tl.store(out_ptr + column, ", "tl.atomic_add(out_ptr + column, ")
    assert kinds(observe(text, "column_sums", {"M": 8, "N": 5})[0]) == {FaultKind.UNINITIALISED}
    zeros = changed(text, "torch.empty(x.shape[1])", "torch.zeros(x.shape[1])")
    assert observe(zeros, "column_sums", {"M": 8, "N": 5})[0].is_sound


def test_a_read_of_what_another_program_stores_is_a_race(observe: Observing) -> None:
    text = changed(COPY, "tl.load(x_ptr + offsets, mask=mask)", "tl.load(x_ptr + offsets + 1, mask=offsets + 1 < n)")
    text = changed(
        text, "copy_kernel[(triton.cdiv(x.numel(), 16),)](x, out,", "copy_kernel[(triton.cdiv(x.numel(), 16),)](x, x,"
    )
    assert FaultKind.RACE in kinds(observe(text, "copy", {"N": 33})[0])


def test_inputs_that_the_launcher_refuses_are_no_fault(observe: Observing) -> None:
    text = changed(
        COPY, "    out = torch.empty_like(x)", "    assert x.numel() % 16 == 0\n    out = torch.empty_like(x)"
    )
    refused, accepted = observe(text, "copy", {"N": 33}, {"N": 32})
    assert refused.is_sound
    assert refused.refusal.startswith("AssertionError")
    assert accepted.is_sound and not accepted.refusal


def test_an_exception_in_the_kernel_names_its_line(observe: Observing) -> None:
    (trace,) = observe(
        changed(COPY, "n, BLOCK: tl.constexpr):\n", "n, BLOCK: tl.constexpr):\n    tl.arange(0, 3)\n"), "copy", {"N": 8}
    )
    (fault,) = trace.faults
    assert (fault.kind, fault.line) == (FaultKind.RAISES, 8)
    assert "power of 2" in fault.detail


def test_without_a_reference_results_must_be_those_of_the_original_where_it_is_sound(observe: Observing) -> None:
    text = changed(COPY, "tl.store(out_ptr + offsets, x, ", "tl.store(out_ptr + offsets, x + 1, ")
    assert kinds(observe(text, "copy", {"N": 33}, original=COPY)[0]) == {FaultKind.WRONG_VALUES}
    broken = changed(COPY, "x_ptr + offsets, mask=mask", "x_ptr + offsets")
    assert observe(text, "copy", {"N": 33}, original=broken)[0].is_sound


def test_an_atomic_addition_without_a_mask_has_none(observe: Observing) -> None:
    text = changed(ROWS, "tl.store(out_ptr + column, ", "tl.atomic_add(out_ptr + column, ")
    (trace,) = observe(changed(text, "torch.empty(", "torch.zeros("), "column_sums", {"M": 8, "N": 5})
    assert [(access.operation, access.is_masked) for access in trace.accesses] == [("load", True), ("atomic", False)]


def test_a_grid_without_programs_writes_nothing(observe: Observing) -> None:
    (trace,) = observe(changed(COPY, "triton.cdiv(x.numel(), 16)", "x.numel() // 16"), "copy", {"N": 5})
    assert (trace.launches[0].programs, trace.launches[0].ran) == (0, 0)
    assert kinds(trace) == {FaultKind.NOT_WRITTEN}
