"""Cross-compilation without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from handwritten import RMS
from triton.compiler import ASTSource

from mtmc_lsp.capture.worker.user_module import load_user_module
from mtmc_lsp.compile.messages import TensorLayout
from mtmc_lsp.compile.occupancy import occupancy
from mtmc_lsp.compile.worker.commands import ast_source
from mtmc_lsp.compile.worker.find_launches import find_launches


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
def kernel(a_ptr, out_ptr, n, one, wide, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at * one, tl.load(a_ptr + at + wide, mask=at < n, other=0.0), mask=at < n)


def kernel_launch(a, kernel=kernel):
    out = torch.empty_like(a)
    kernel[(1,)](a, out, a.shape[0], a.shape[1], a.shape[0] * 16, BLOCK=64, num_warps=2)
    return out
"""


@pytest.mark.parametrize("shape", [(37, 1), (64, 3), (1, 16)])
def test_what_is_compiled_is_what_a_launch_finds_in_tritons_cache(tmp_path: Path, shape: tuple[int, int]) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    path = tmp_path / "file.py"
    path.write_text(f"import torch\n{KERNEL}")
    module = load_user_module(str(path), path.read_text(), "launched_file")
    (launch,) = find_launches(module.kernel_launch, [TensorLayout(shape, (shape[1], 1), "float32")])
    target = GPUTarget("cuda", 90, 32)
    kernel, backend = module.kernel, make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    a = torch.empty(shape)
    given = {"BLOCK": 64, "num_warps": 2}
    bound, special, options = bind(a, a, shape[0], shape[1], shape[0] * 16, **given)
    _, signature, constexprs, attrs = kernel._pack_args(backend, {**given, "debug": False}, bound, special, options)
    theirs = ASTSource(kernel, signature, constexprs, attrs)
    assert ast_source(kernel, launch, target).hash() == theirs.hash()
