"""Releases the GPU while Triton compiles kernels, and lets versions of a file share compiled kernels. Runs in workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
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


def share_kernels(module: ModuleType) -> None:
    """Let a version of a file use kernels that were compiled for another version.

    The key of Triton's cache contains the line where a kernel begins, which differs between versions, although the compiled code
    is the same. Messages keep the true line.
    """
    from triton.runtime.jit import JITFunction

    for value in vars(module).values():
        kernel = value
        while hasattr(kernel, "fn") and not isinstance(kernel, JITFunction):
            kernel = kernel.fn
        if isinstance(kernel, JITFunction) and kernel.__module__ == module.__name__:
            kernel.starting_line_number = 1
