"""Runs a file with kernels as a program on the CPU: ``python -m mtmc_lsp.kernels.worker.run_on_cpu FILE``."""

from __future__ import annotations

import sys
from pathlib import Path

from mtmc_lsp.kernels.worker.cuda_on_cpu import source_on_cpu, stand_in_for_cuda
from mtmc_lsp.verify.worker.interpreter import prepare_interpreter


def run(file: Path) -> None:
    """Run a file under Triton's interpreter, with CPU devices in place of GPU devices."""
    import linecache

    prepare_interpreter()
    stand_in_for_cuda()
    text = source_on_cpu(file.read_text(encoding="utf-8"))
    # Triton reads the source of kernels.
    linecache.cache[str(file)] = (len(text), None, text.splitlines(keepends=True), str(file))
    module = type(sys)("__main__")
    module.__file__ = str(file)
    sys.modules["__main__"] = module
    exec(compile(text, str(file), "exec"), module.__dict__)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
