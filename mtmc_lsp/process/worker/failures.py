"""Maps exceptions of Python, torch and Triton to a :class:`FailureKind`. All such decisions are made here. Runs in workers."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from typing import Any

from mtmc_lsp.core.errors import FailureKind, MtmcError

CUDA_OUT_OF_MEMORY = 2
CUDA_ASSERT = 710
CUDA_USABLE_AFTER = frozenset({1, 9, 35, 98, 100, 101, 209, 600, 701, 801, 900, 901, 902, 903, 904, 905, 906, 907, 908})
"""``cudaError_t`` codes after which the context still works: invalid arguments and launch configurations, a missing driver,
device or kernel image, too many resources for one launch, an unsupported call, errors of stream capture. Source: CUDA
runtime API, ``driver_types.h``."""

CUDA_ERROR_TEXTS = (
    ("device-side assert", FailureKind.DEVICE_ASSERT),
    ("out of memory", FailureKind.GPU_OUT_OF_MEMORY),
    ("ALLOC_FAILED", FailureKind.GPU_OUT_OF_MEMORY),
    ("illegal memory access", FailureKind.GPU_CONTEXT_LOST),
    ("illegal address", FailureKind.GPU_CONTEXT_LOST),
    ("illegal instruction", FailureKind.GPU_CONTEXT_LOST),
    ("misaligned address", FailureKind.GPU_CONTEXT_LOST),
    ("unspecified launch failure", FailureKind.GPU_CONTEXT_LOST),
    ("launch timed out", FailureKind.GPU_CONTEXT_LOST),
    ("uncorrectable ECC", FailureKind.GPU_CONTEXT_LOST),
    ("context is destroyed", FailureKind.GPU_CONTEXT_LOST),
)
"""Texts of ``cuGetErrorString`` and of cuBLAS status codes."""
CUDA_PREFIXES = (
    "CUDA error:",
    "CUDA driver error:",
    "Triton Error [CUDA]:",
    "cuDNN error:",
    "HIP error:",
    "Triton Error [HIP]:",
)
"""Beginnings of ``RuntimeError`` messages for failed GPU calls that have no exception type and no error code: Triton's
driver, cuBLAS and cuDNN in torch."""
CPU_ALLOCATOR = "DefaultCPUAllocator"
"""Torch's allocator on the host raises a plain ``RuntimeError`` that names it."""


def classify(error: BaseException) -> FailureKind:
    """The kind of failure of an exception, or of the first exception in its chain of causes that has a specific kind."""
    for each in exception_chain(error):
        kind = _own_kind(each)
        if kind is not FailureKind.EXCEPTION:
            return kind
    return FailureKind.EXCEPTION


def exception_chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and the exceptions that caused it, from the last to the first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _own_kind(error: BaseException) -> FailureKind:
    if isinstance(error, MtmcError):
        return error.kind
    if isinstance(error, MemoryError):
        return FailureKind.OUT_OF_MEMORY
    if isinstance(error, SystemExit):
        return FailureKind.EXITED
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return FailureKind.GPU_OUT_OF_MEMORY
    if torch is not None and _is_missing_gpu(error, torch.cuda):
        return FailureKind.NO_GPU
    if torch is not None and isinstance(error, torch.AcceleratorError):
        return _of_cuda_code(getattr(error, "error_code", None), str(error))
    if _is_triton_compile_error(error):
        return FailureKind.COMPILE_ERROR
    return _of_runtime_error(str(error)) if isinstance(error, RuntimeError) else FailureKind.EXCEPTION


def _is_missing_gpu(error: BaseException, cuda: Any) -> bool:
    """Whether torch could not initialise CUDA because no GPU is available.

    A CPU build raises ``AssertionError``, a CUDA build ``RuntimeError``. Both raise it in ``torch.cuda._lazy_init``.
    """
    if not isinstance(error, (AssertionError, RuntimeError)):
        return False
    initialise = cuda._lazy_init.__code__
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_code is initialise for frame in frames) and not cuda.is_available()


def _of_cuda_code(code: int | None, text: str) -> FailureKind:
    if code is None:
        return _of_cuda_text(text)
    if code == CUDA_OUT_OF_MEMORY:
        return FailureKind.GPU_OUT_OF_MEMORY
    if code == CUDA_ASSERT:
        return FailureKind.DEVICE_ASSERT
    return FailureKind.GPU_ERROR if code in CUDA_USABLE_AFTER else FailureKind.GPU_CONTEXT_LOST


def _is_triton_compile_error(error: BaseException) -> bool:
    # Through sys.modules: an exception of Triton exists only where Triton is imported.
    compiler: Any = sys.modules.get("triton.compiler.errors")
    runtime: Any = sys.modules.get("triton.runtime.errors")
    if compiler is not None and isinstance(error, compiler.CompilationError):
        return True
    return runtime is not None and isinstance(error, (runtime.OutOfResources, runtime.PTXASError))


def _of_runtime_error(text: str) -> FailureKind:
    if CPU_ALLOCATOR in text:
        return FailureKind.OUT_OF_MEMORY
    return _of_cuda_text(text) if text.startswith(CUDA_PREFIXES) else FailureKind.EXCEPTION


def _of_cuda_text(text: str) -> FailureKind:
    return next((kind for words, kind in CUDA_ERROR_TEXTS if words in text), FailureKind.GPU_ERROR)
