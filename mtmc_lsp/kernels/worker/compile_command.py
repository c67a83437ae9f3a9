"""Cross-compiles kernels of a file that expects a GPU. Runs in workers."""

from __future__ import annotations

from dataclasses import replace

import torch

from mtmc_lsp.compile.worker.commands import compile_launches
from mtmc_lsp.core.results import CompileReport
from mtmc_lsp.kernels.messages import KernelCompileRequest
from mtmc_lsp.kernels.worker.cuda_on_cpu import source_on_cpu, stand_in_for_cuda


def compile_kernels(request: KernelCompileRequest) -> CompileReport:
    """Compile the launches; where there is no GPU, with stand-ins for it while the file is imported."""
    if torch.cuda.is_available():
        return compile_launches(request.request)
    stand_in_for_cuda()
    return compile_launches(replace(request.request, source=source_on_cpu(request.request.source)))
