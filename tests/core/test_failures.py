"""Exceptions of Python, torch and Triton are classified by type and error code."""

from __future__ import annotations

import ast

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from mtmc_lsp.core.errors import FailureKind, OutOfMemory, TargetRaises
from mtmc_lsp.process.worker.failures import classify


def accelerator_error(code: int, text: str = "CUDA error: something") -> BaseException:
    """As torch raises it: the C++ side sets the code as an attribute."""
    error = torch.AcceleratorError(text)
    error.error_code = code  # type: ignore[attr-defined]
    return error


def cpu_allocation() -> BaseException:
    """A real failure of torch's allocator: no machine has this much memory."""
    try:
        torch.empty(1 << 60, dtype=torch.int8)
    except RuntimeError as error:
        return error
    raise AssertionError("an exbibyte was allocated")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("CUDA error: out of memory"), FailureKind.EXCEPTION),
        (RuntimeError("the model is out of memory cells"), FailureKind.EXCEPTION),
        (RuntimeError("my CUDA error: illegal memory access"), FailureKind.EXCEPTION),
        (MemoryError(), FailureKind.OUT_OF_MEMORY),
        (cpu_allocation(), FailureKind.OUT_OF_MEMORY),
        (SystemExit(1), FailureKind.EXITED),
        (torch.OutOfMemoryError("any text"), FailureKind.GPU_OUT_OF_MEMORY),
        (accelerator_error(2), FailureKind.GPU_OUT_OF_MEMORY),
        (accelerator_error(710), FailureKind.DEVICE_ASSERT),
        (accelerator_error(700), FailureKind.GPU_CONTEXT_LOST),
        (accelerator_error(719), FailureKind.GPU_CONTEXT_LOST),
        (accelerator_error(9), FailureKind.GPU_ERROR),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), FailureKind.DEVICE_ASSERT),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), FailureKind.GPU_CONTEXT_LOST),
        (RuntimeError("Triton Error [CUDA]: device-side assert triggered"), FailureKind.DEVICE_ASSERT),
        (RuntimeError("Triton Error [CUDA]: out of memory"), FailureKind.GPU_OUT_OF_MEMORY),
        (RuntimeError("Triton Error [CUDA]: invalid argument"), FailureKind.GPU_ERROR),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x"), FailureKind.GPU_OUT_OF_MEMORY),
        (CompilationError("x", ast.parse("x").body[0], "no"), FailureKind.COMPILE_ERROR),
        (OutOfResources(300_000, 232_448, "shared memory"), FailureKind.COMPILE_ERROR),
        (PTXASError("no"), FailureKind.COMPILE_ERROR),
        (OutOfMemory("full"), FailureKind.OUT_OF_MEMORY),
    ],
    ids=lambda value: value.value if isinstance(value, FailureKind) else f"{type(value).__name__} {value}"[:50],
)
def test_an_exception_has_its_kind(error: BaseException, kind: FailureKind) -> None:
    assert classify(error) is kind


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="there is a GPU")
def test_a_cuda_call_without_a_gpu_has_its_kind() -> None:
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        torch.zeros(1, device="cuda")
    assert classify(caught.value) is FailureKind.NO_GPU
    assert classify(AssertionError(str(caught.value))) is FailureKind.EXCEPTION


def test_the_kind_of_the_cause_passes_through_an_error_for_the_user() -> None:
    try:
        try:
            raise accelerator_error(700)
        except RuntimeError as error:
            raise TargetRaises("f raises") from error
    except TargetRaises as error:
        kind = classify(error)
    assert kind is FailureKind.GPU_CONTEXT_LOST
    assert kind.is_gpu_failure and not kind.is_out_of_memory


def test_every_kind_that_costs_the_context_is_a_gpu_failure() -> None:
    assert {kind for kind in FailureKind if kind.is_gpu_failure} == {
        FailureKind.GPU_ERROR,
        FailureKind.GPU_CONTEXT_LOST,
        FailureKind.DEVICE_ASSERT,
        FailureKind.GPU_OUT_OF_MEMORY,
    }
