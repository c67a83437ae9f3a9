"""Kernels as other packages write them: names of their files, caches of constant size, slots, float8."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mtmc_lsp.app.kernels.opening import open_kernel
from mtmc_lsp.app.kernels.repair import repair_kernel
from mtmc_lsp.app.kernels.session import KernelSession
from mtmc_lsp.app.target_file import open_target, parse_request
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.kernels.messages import CaseTrace, FaultKind

HEAD = "import torch\nimport triton\nimport triton.language as tl\n\n\n"
NAMES = """import importlib.util

import torch
import triton
import triton.language as language
import triton.language as tl
from triton.language import arange, constexpr, load, program_id, store
from triton.language.math import exp as exponential


def found(name):
    spec = importlib.util.find_spec("triton.language.extra.libdevice")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


rsqrt = found("rsqrt")


@triton.jit
def k(x_ptr, y_ptr, n, BLOCK: constexpr):
    at = program_id(0) * BLOCK + arange(0, BLOCK)
    x = load(x_ptr + at, mask=at < n, other=1.0)
    store(y_ptr + at, rsqrt(exponential(x)), mask=at < n)


def reference(x):
    return torch.rsqrt(torch.exp(x))


# mtmc: x=f32[N] N=100 reference=reference
def launch(x):
    y = torch.empty_like(x)
    k[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
    return y
"""
SLOTS = (
    HEAD
    + """@triton.jit
def k(x_ptr, slots_ptr, cache_ptr, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * D + at, mask=at < D, other=0.0)
    tl.store(cache_ptr + slot * D + at, x, mask=at < D)


# mtmc: x=f32[T,64] slots=i64[T]@0..511 cache=f32[512,64] T=40
def launch(x, slots, cache):
    k[(x.shape[0],)](x, slots, cache, x.shape[1], BLOCK=64)
"""
)
FLOAT8 = (
    HEAD
    + """@triton.jit
def k(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32), mask=at < n)


# mtmc: x=f8e4m3[N] N=100
def launch(x):
    y = torch.empty(x.shape, device=x.device)
    k[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
    return y
"""
)


def session_of(folder: Path, text: str) -> KernelSession:
    file = folder / "model.py"
    file.write_text(text)
    return KernelSession(open_kernel(open_target(parse_request(f"{file}::launch", python=sys.executable))))


def observed(folder: Path, text: str) -> Sequence[CaseTrace]:
    with session_of(folder, text) as session:
        traces = session.trace(text.encode(), session.cases())
    assert traces
    return traces


@pytest.mark.parametrize("text", [NAMES, FLOAT8], ids=["names of the file", "float8"])
def test_sound_kernels_with_unusual_names_and_types_are_observed_without_a_fault(tmp_path: Path, text: str) -> None:
    for trace in observed(tmp_path, text):
        assert (trace.faults, trace.refusal) == ((), ""), trace.case.text
        assert trace.launches


def test_equal_slots_are_no_fault_of_a_kernel_that_stores_to_slots(tmp_path: Path) -> None:
    traces = observed(tmp_path, SLOTS)
    assert all(trace.is_sound for trace in traces)
    assert any(trace.case.has_distinct_integers for trace in traces)
    assert "distinct integers" in next(t.case.text for t in traces if t.case.has_distinct_integers)


@pytest.mark.parametrize(
    "change", [("slot * D + at, x", "at, x"), ("@0..511", "@0..7")], ids=["one row", "fewer slots than rows"]
)
def test_programs_that_store_to_one_element_for_other_reasons_stay_a_race(
    tmp_path: Path, change: tuple[str, str]
) -> None:
    assert change[0] in SLOTS
    traces = observed(tmp_path, SLOTS.replace(*change))
    assert any(fault.kind is FaultKind.RACE for trace in traces for fault in trace.faults)


def test_a_reference_decides_what_equal_slots_give(tmp_path: Path) -> None:
    reference = "def reference(x, slots, cache):\n    cache[slots] = x\n\n\n# mtmc: reference=reference "
    traces = observed(tmp_path, SLOTS.replace("# mtmc: ", reference))
    assert not any(trace.case.has_distinct_integers for trace in traces)
    assert any(fault.kind is FaultKind.RACE for trace in traces for fault in trace.faults)


def test_large_arguments_of_constant_size_leave_cases_of_the_named_sizes(tmp_path: Path) -> None:
    sizes = [trace.case.sizes["T"] for trace in observed(tmp_path, SLOTS)]
    assert {1, 2, 40} <= {*sizes}


def test_a_launcher_that_accepts_no_case_is_refused_with_its_reason(tmp_path: Path) -> None:
    text = SLOTS.replace("    k[", '    raise ValueError("slots must be on a grid")\n    k[')
    with session_of(tmp_path, text) as session, pytest.raises(RequestError) as caught:
        repair_kernel(session)
    assert caught.value.message == "no call of launch could be observed: ValueError: slots must be on a grid"
    assert "example inputs" in caught.value.remedy
