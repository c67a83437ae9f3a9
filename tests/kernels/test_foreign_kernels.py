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
from mtmc_lsp.source.lint import check, context_of
from mtmc_lsp.source.outline import Outliner
from mtmc_lsp.source.syntax import parse
from tests.cli.runner import mtmc

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
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


PRODUCT = (
    HEAD
    + """@triton.jit
def k(a_ptr, b_ptr, c_ptr, K, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = tl.load(a_ptr + at, mask=at < K, other=None).to(tl.int32)
    b = tl.load(b_ptr + at, mask=at < K, other=None).to(tl.int32)
    tl.store(c_ptr, tl.sum(a * b, 0))


# mtmc: a=i8[K]@-100..100 b=i8[K]@-100..100 K=100
def launch(a, b):
    c = torch.empty((), device=a.device, dtype=torch.int32)
    k[(1,)](a, b, c, a.numel(), BLOCK=128)
    return c
"""
)


def test_undefined_lanes_of_integers_are_repaired_without_a_reference(tmp_path: Path) -> None:
    with session_of(tmp_path, PRODUCT) as session:
        report = repair_kernel(session)
    assert report.failing is not None
    assert {fault.kind for fault in report.failing.faults} == {FaultKind.UNDEFINED_LANES}
    assert report.is_repaired, report.summary
    assert len([line for line in report.diff.splitlines() if line.startswith("+ ")]) == 1


ASSEMBLY = SLOTS.replace(
    "    tl.store(",
    """    x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f, f", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(""",
)


def test_what_the_interpreter_lacks_is_no_fault_of_a_kernel(tmp_path: Path) -> None:
    with session_of(tmp_path, ASSEMBLY) as session, pytest.raises(RequestError) as caught:
        repair_kernel(session)
    assert caught.value.message == (
        "no call of launch could be observed: line 12: Triton's interpreter has no inline_asm"
    )


def test_libdevice_rounds_halves_away_from_zero(tmp_path: Path) -> None:
    text = NAMES.replace('found("rsqrt")', 'found("round")').replace("rsqrt(exponential(x))", "rsqrt(x)")
    text = text.replace("torch.rsqrt(torch.exp(x))", "torch.sign(x) * torch.floor(x.abs() + 0.5)")
    halves = text.replace("    y = torch.empty_like(x)", "    x = (2.0 * x).round() / 2.0\n    y = torch.empty_like(x)")
    halves = halves.replace("def reference(x):", "def reference(x):\n    x = (2.0 * x).round() / 2.0")
    assert all(trace.is_sound for trace in observed(tmp_path, halves))
    assert any(
        not trace.is_sound
        for trace in observed(tmp_path, halves.replace("torch.floor(x.abs() + 0.5)", "x.abs().round()"))
    )


@pytest.mark.parametrize("name", ["launch", "k"])
def test_a_launcher_is_profiled_like_its_kernel(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.py").write_text(SLOTS)
    shown = mtmc(tmp_path, "profile", f"model.py::{name}", **NO_GPU)
    assert shown.code == 0, shown.err
    assert "k, launched by launch with T=40" in shown.out


def test_the_text_of_a_kernel_is_profiled_where_its_call_cannot_be_observed(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(ASSEMBLY)
    shown = mtmc(tmp_path, "profile", "model.py::launch", **NO_GPU)
    assert shown.code == 0, shown.err
    assert "not observed: line 12: Triton's interpreter has no inline_asm" in " ".join(shown.out.split())


GATED = (
    HEAD
    + """@triton.autotune(configs=[triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})], key=["n"])
@triton.jit
def k(X, Y, OUT, stride_x, stride_y, stride_out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    X += row * stride_x
    Y += row * stride_y
    OUT += row * stride_out
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + cols, mask=cols < n, other=0.0).to(tl.float32)
    y = tl.load(Y + cols, mask=cols < n, other=0.0).to(tl.float32)
    tl.store(OUT + cols, x * tl.sigmoid(x) * y, mask=cols < n)


def gated(xy):
    x, y = xy.chunk(2, dim=-1)
    return x * torch.sigmoid(x) * y


# mtmc: xy=f32[M,80] M=9 reference=gated
def launch(xy):
    x, y = xy.chunk(2, dim=-1)
    out = torch.empty(x.shape, device=x.device)
    n = x.shape[1]
    grid = lambda meta: (x.shape[0], triton.cdiv(n, meta["BLOCK"]))
    k[grid](x, y, out, x.stride(0), y.stride(0), out.stride(0), n)
    return out
"""
)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("    OUT += row * stride_out\n", ""),
        ('{"BLOCK": 32}', '{"BLOCK": 48}'),
        ("x = tl.load(X + cols, mask=cols < n, other=0.0)", "x = tl.load(X + cols)"),
        ("x * tl.sigmoid(x) * y, mask=cols < n", "x * tl.sigmoid(x) * y, mask=cols <= n"),
    ],
    ids=["a pointer that stays", "a block in a configuration", "no mask", "one element too many"],
)
def test_faults_of_autotuned_kernels_are_repaired_in_few_lines(tmp_path: Path, before: str, after: str) -> None:
    assert GATED.count(before) == 1
    with session_of(tmp_path, GATED.replace(before, after)) as session:
        report = repair_kernel(session)
    assert report.is_repaired, report.summary
    assert (
        report.result.text.decode().strip()
        == GATED.replace('"BLOCK": 32', '"BLOCK": 64' if "48" in after else '"BLOCK": 32').strip()
    )


def test_a_mask_is_added_in_the_form_that_the_pointer_has() -> None:
    kernel = """@triton.jit
def k(index_ptr, x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(index_ptr + at)
    x = tl.load(x_ptr + rows[:, None] * 8 + tl.arange(0, 8)[None, :], mask=at[:, None] < n, other=0.0)
    tl.store(x_ptr + rows[:, None], x, mask=at[:, None] < n)
"""
    text = (HEAD + kernel).encode()
    outline = Outliner("/m.py").outline(text, parse(text))
    context = context_of(outline)
    found = [finding for chunk in outline.chunks for finding in check(chunk.text, context)]
    fixes = [finding.fix.new for finding in found if finding.code == "unmasked-access" and finding.fix is not None]
    assert fixes == [", mask=at < n, other=0.0"]


HALVES = (
    HEAD
    + """@triton.jit
def k(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    a = tl.load(x_ptr + row * 2 * D + at, mask=at < D, other=0.0)
    b = tl.load(x_ptr + row * 2 * D + D + at, mask=at < D, other=0.0)
    tl.store(y_ptr + row * D + at, a * b, mask=at < D)


def reference(y, x):
    d = y.shape[-1]
    y.copy_(x[:, :d] * x[:, d:])


# mtmc: y=f32[T,D] x=f32[T,2*D] T=64 D=512 reference=reference
def launch(y, x):
    k[(x.shape[0],)](x, y, y.shape[1], BLOCK=triton.next_power_of_2(y.shape[1]))
"""
)


def test_sizes_that_the_reference_depends_on_stay_when_others_are_reduced(tmp_path: Path) -> None:
    with session_of(tmp_path, HALVES) as session:
        report = repair_kernel(session)
    assert report.was_sound, report.summary
    assert report.verdict is not None
    assert report.verdict.is_correct
