"""Releases the GPU while Triton compiles kernels, which takes the CPU alone. Runs in workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from mtmc_lsp.process.gpu_lock import unshared


@contextlib.contextmanager
def compiling_unshared() -> Iterator[None]:
    """Let other runs time while a kernel of this request is compiled: seconds if the kernel is not in Triton's cache."""
    from triton.runtime.jit import JITFunction

    original = getattr(JITFunction, "_do_compile", None)
    if original is None:
        # Another version of Triton: others wait.
        yield
        return

    def compile_unshared(*args: Any, **kwargs: Any) -> Any:
        with unshared():
            return original(*args, **kwargs)

    JITFunction._do_compile = compile_unshared
    try:
        yield
    finally:
        JITFunction._do_compile = original
