"""Runs a file as a program, and returns what it prints. Runs in workers; each runs one file."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys

from mtmc_lsp.kernels.messages import ProgramAnswer, ProgramRequest
from mtmc_lsp.kernels.worker.autotuners import first_configs, short_benchmarks
from mtmc_lsp.process.worker.host_numbers import DrawingUnshared
from mtmc_lsp.process.worker.kernel_compilation import compiling_unshared, passing_at_launches, sharing_kernels
from mtmc_lsp.process.worker.threads import one_thread


def run_program(request: ProgramRequest) -> ProgramAnswer:
    """Run the file with the name ``__main__``; other runs time while it compiles.

    Autotuners measure their configurations for a shorter time, or use the first one: what the file computes is the same.
    """
    output, problem = io.StringIO(), ""
    sys.argv, folder = [request.path], os.path.dirname(request.path)
    sys.path.insert(0, folder)
    try:
        choosing = short_benchmarks() if request.tunes else first_configs()
        with (
            contextlib.redirect_stdout(output),
            compiling_unshared(),
            DrawingUnshared(),
            passing_at_launches(),
            sharing_kernels(),
            choosing,
            one_thread(),
        ):
            runpy.run_path(request.path, run_name="__main__")
            _finish()
    except SystemExit as error:
        problem = f"SystemExit: {error.code}" if error.code else ""
    except Exception as error:  # the user's code raises anything
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    return ProgramAnswer(output.getvalue(), problem)


def _finish() -> None:
    """Wait for the GPU, so that errors of kernels show."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
