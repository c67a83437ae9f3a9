"""Cross-compilation without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from handwritten import RMS
from triton.backends.nvidia import driver
from triton.compiler import ASTSource

from mtmc_lsp.capture.worker.user_module import load_user_module
from mtmc_lsp.compile.messages import CompileRequest, LauncherCalls, TensorLayout
from mtmc_lsp.compile.occupancy import occupancy
from mtmc_lsp.compile.worker.commands import ast_source, compile_launches
from mtmc_lsp.compile.worker.find_launches import find_launches
from mtmc_lsp.core.results import CompileReport
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.measure.compilation import KernelCompiler
from mtmc_lsp.process.worker_pool import WorkerPool


def test_every_kernel_is_compiled_for_nvidia_and_amd_and_its_resources_are_read(measurer_of) -> None:
    report = measurer_of(RMS).compile(RMS.candidate())
    assert report.ok
    assert [kernel.arch for kernel in report.kernels] == ["sm_90", "gfx942"]
    for kernel in report.kernels:
        assert kernel.registers is not None
        assert 4 <= kernel.registers <= 64
        assert kernel.spills == 0
        assert kernel.shared_bytes <= 1024
        assert kernel.occupancy == 1.0
    assert report.seconds > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("tl.sum(x * x, axis=0)", "tl.total(x)"), "total"),
        (("tl.sum(x * x, axis=0)", "tl.sum(x * y, axis=0)"), "y"),
        (("@triton.jit", "@triton.jitt"), "jitt"),
        (("def rms_kernel", "def another_kernel"), "rms_kernel"),
    ],
)
def test_what_does_not_compile_is_reported_with_the_compilers_words(measurer_of, change, said: str) -> None:
    report = measurer_of(RMS).compile(RMS.candidate(change))
    assert not report.ok
    assert said in report.kernels[0].error


def test_a_kernel_that_needs_too_much_shared_memory_does_not_fit(measurer_of) -> None:
    """128 KiB of float32 tiles times pipeline stages: an sm_90 block has room, a gfx942 one has not."""
    block = """

@triton.jit
def big_kernel(a_ptr, b_ptr, out_ptr, K, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)
    cols = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK):
        a = tl.load(a_ptr + rows[:, None] * K + k + cols[None, :])
        b = tl.load(b_ptr + (k + rows)[:, None] * BLOCK + cols[None, :])
        total = tl.dot(a, b, total)
    tl.store(out_ptr + rows[:, None] * BLOCK + cols[None, :], total)
"""
    candidate = RMS.candidate(("\n\n@triton.jit\ndef rms_kernel", block + "\n\n@triton.jit\ndef rms_kernel"))
    signature = {"a_ptr": "*fp16", "b_ptr": "*fp16", "out_ptr": "*fp32", "K": "i32"}
    pointers = ("a_ptr", "b_ptr", "out_ptr", "K")
    launch = replace(
        RMS.launches[0],
        kernel="big_kernel",
        signature=signature,
        constexprs={"BLOCK": 128},
        num_warps=8,
        num_stages=5,
        divisible_by_16=pointers,
    )
    report = measurer_of(RMS).compile(replace(candidate, launches=(launch,)))
    assert any("shared memory" in kernel.error for kernel in report.kernels), report


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "arch", "expected"),
    [
        (32, 0, 4, "sm_90", 1.0),
        (64, 0, 4, "sm_90", 0.5),
        (255, 0, 8, "sm_90", 0.125),
        (32, 100_000, 4, "sm_90", 0.125),
        (32, 0, 4, "sm_86", 1.0),
        (40, 0, 8, "sm_86", 1.0),
        (128, 0, 4, "gfx942", 0.5),
        (64, 33_000, 4, "gfx942", 0.125),
        (32, 0, 4, "unheard-of", None),
    ],
)
def test_occupancy_is_that_of_the_vendors_calculators(registers, shared, warps, arch, expected) -> None:
    assert occupancy(registers, shared, warps, arch) == expected


KERNEL = """import triton
import triton.language as tl


@triton.jit
def kernel(a_ptr, out_ptr, n, one, wide, flag, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at * one, tl.load(a_ptr + at + wide, mask=at < n, other=0), mask=(at < n) & flag)


def kernel_launch(a, kernel=kernel):
    out = torch.empty_like(a)
    kernel[(1,)](a, out, a.shape[0], a.shape[1], a.shape[0] * 16, a.shape[0] > 2, BLOCK=64, num_warps=2)
    return out
"""


@pytest.mark.parametrize("dtype", ["float32", "bool"])
@pytest.mark.parametrize("shape", [(37, 1), (64, 3), (1, 16)])
def test_what_is_compiled_is_what_a_launch_finds_in_tritons_cache(
    tmp_path: Path, shape: tuple[int, int], dtype: str
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    path = tmp_path / "file.py"
    path.write_text(f"import torch\n{KERNEL}")
    module = load_user_module(str(path), path.read_text(), "launched_file")
    (launch,) = find_launches(module.kernel_launch, [TensorLayout(shape, (shape[1], 1), dtype)])
    target = GPUTarget("cuda", 90, 32)
    kernel, backend = module.kernel, make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    a = torch.empty(shape, dtype=getattr(torch, dtype))
    given = {"BLOCK": 64, "num_warps": 2}
    bound, special, options = bind(a, a, shape[0], shape[1], shape[0] * 16, shape[0] > 2, **given)
    _, signature, constexprs, attrs = kernel._pack_args(backend, {**given, "debug": False}, bound, special, options)
    theirs = ASTSource(kernel, signature, constexprs, attrs)
    assert ast_source(kernel, launch, target).hash() == theirs.hash()


@pytest.mark.parametrize("builds", [False, True])
def test_launchers_are_built_with_the_kernels_for_a_gpu_of_this_machine(
    builds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton 3.6 needs a launcher for each signature. If one cannot be built ahead, the first launch builds it."""

    def built(source: ASTSource, metadata: object) -> None:
        assert metadata.num_warps == 2  # type: ignore[attr-defined]
        (tmp_path / source.fn.__name__).write_text(" ".join(source.signature))
        raise RuntimeError("there is no C compiler")

    monkeypatch.setattr(driver, "make_launcher", None, raising=False)
    monkeypatch.setattr(driver, "CudaLauncher", built)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "file.py"
    path.write_text(f"import torch\n{KERNEL}")
    calls = LauncherCalls("kernel_launch", ((TensorLayout((64, 3), (3, 1), "float32"),),))
    report = compile_launches(
        CompileRequest(str(path), "built_file", path.read_text(), (), ("sm_90",), 120.0, calls, builds)
    )
    assert report.ok, report
    assert (tmp_path / "kernel").exists() is builds


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_run_on_a_gpu_asks_for_launchers(has_gpu: bool, capture_of: Callable[..., Capture]) -> None:
    asked: list[CompileRequest] = []

    class Compiler:
        def call(self, request: CompileRequest, *_: object) -> CompileReport:
            asked.append(request)
            return CompileReport()

    worker: Any = Compiler()
    with ThreadPoolExecutor(1) as background:
        pool = WorkerPool(has_gpu=has_gpu)
        compiler = KernelCompiler(capture_of(RMS), pool, worker, worker, background, archs=("sm_90",), seconds=60.0)
        compiler.compile(RMS.candidate())
        compiler.compile_in_background(RMS.candidate(), [])
    assert [request.builds_launchers for request in asked] == [has_gpu, has_gpu]
