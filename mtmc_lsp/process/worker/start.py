"""The start command: imports torch and creates the GPU context. Runs in workers."""

from __future__ import annotations

import torch

from mtmc_lsp.process import sandbox
from mtmc_lsp.process.messages import StartAnswer, StartRequest

GPU_MEMORY_FRACTION = 0.85
"""Share of the GPU's memory that a candidate may use; the reference process needs some too."""
MAX_ERROR_CHARACTERS = 600


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
        except Exception as error:
            failure = f"{type(error).__name__}: {str(error)[:MAX_ERROR_CHARACTERS]}"
    return StartAnswer(sandbox.active, gpu, free_bytes, failure)
