"""The start command: imports torch and creates the GPU context. Runs in workers."""

from __future__ import annotations

import contextlib

import torch

from mtmc_lsp.process import sandbox
from mtmc_lsp.process.messages import Libraries, StartAnswer, StartRequest

GPU_MEMORY_FRACTION = 0.85
"""Share of the GPU's memory that a candidate may use; the reference process needs some too."""
MAX_ERROR_CHARACTERS = 600
SIDE = 16
"""Rows and columns of the small matrices and images with which libraries are loaded."""

_loaded = set[tuple[str, str]]()
"""Kinds of operations and dtypes whose libraries are loaded."""


def start(request: StartRequest) -> StartAnswer:
    """Create the GPU context, if requested."""
    gpu = failure = ""
    free_bytes = 0
    if request.gpu:
        try:
            torch.zeros(1, device="cuda")
            free_bytes = torch.cuda.mem_get_info()[0]
            gpu = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
            if request.for_candidates:
                import triton

                # Builds Triton's launcher, so this also tests the C compiler and the cache folder.
                triton.runtime.driver.active.get_current_target()
                torch.cuda.set_per_process_memory_fraction(GPU_MEMORY_FRACTION)
            load_libraries(request.libraries, "cuda")
        except Exception as error:
            failure = f"{type(error).__name__}: {str(error)[:MAX_ERROR_CHARACTERS]}"
    return StartAnswer(sandbox.active, gpu, free_bytes, failure)


def load_libraries(libraries: Libraries, device: str) -> None:
    """Run one small operation of each kind, unless that was done. A failure is left to the code that needs the library."""
    with torch.no_grad():
        for dtype in libraries.products:
            with contextlib.suppress(Exception):
                if _is_new("product", dtype):
                    square = torch.ones(SIDE, SIDE, dtype=getattr(torch, dtype), device=device)
                    square @ square
        for dtype in libraries.convolutions:
            with contextlib.suppress(Exception):
                if _is_new("convolution", dtype):
                    image = torch.ones(1, SIDE, SIDE, SIDE, dtype=getattr(torch, dtype), device=device)
                    torch.nn.functional.conv2d(image, image.expand(SIDE, SIDE, SIDE, SIDE)[..., :3, :3].contiguous())


def _is_new(kind: str, dtype: str) -> bool:
    is_new = (kind, dtype) not in _loaded
    _loaded.add((kind, dtype))
    return is_new
