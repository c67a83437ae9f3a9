"""Releases the GPU while Triton compiles kernels, and lets versions of a file share compiled kernels. Runs in workers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

from mtmc_lsp.process.gpu_lock import let_timings_pass, unshared

compile_seconds = [0.0]
"""Seconds that this process compiled kernels while others could time."""
COMPILER_THREADS = 3
MOST_CALLS = 16
"""Launches of one call that are compiled ahead."""


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
        began = time.monotonic()
        try:
            with unshared():
                kernel = original(*args, **kwargs)
                if not hasattr(kernel, "result"):
                    _build_launchers([kernel])
                return kernel
        finally:
            compile_seconds[0] += time.monotonic() - began

    JITFunction._do_compile = compile_unshared
    try:
        yield
    finally:
        JITFunction._do_compile = original


@contextlib.contextmanager
def passing_at_launches() -> Iterator[None]:
    """Let another run time before a launch, if it waits for that: otherwise it waits until a program ends or compiles."""
    from triton.runtime.jit import JITFunction

    original = JITFunction.run

    def run(*args: Any, **kwargs: Any) -> Any:
        let_timings_pass()
        return original(*args, **kwargs)

    setattr(JITFunction, "run", run)  # noqa: B010 - mypy refuses to assign methods
    try:
        yield
    finally:
        setattr(JITFunction, "run", original)  # noqa: B010


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


@contextlib.contextmanager
def sharing_kernels() -> Iterator[None]:
    """Let the kernels of a program use those that were compiled for versions of its file, as :func:`share_kernels` does."""
    from triton.runtime.jit import JITFunction

    original = JITFunction.__init__

    def shared(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.fn.__module__ == "__main__":
            self.starting_line_number = 1

    setattr(JITFunction, "__init__", shared)  # noqa: B010 - mypy refuses to assign methods
    try:
        yield
    finally:
        setattr(JITFunction, "__init__", original)  # noqa: B010


def compile_ahead(run: Callable[[], object], numbers: Collection[int] | None = None) -> None:
    """Compile the kernels that a call launches, with each configuration of their autotuners, while others use the GPU.

    Otherwise each compilation releases the GPU and waits for it again. The call launches nothing here, so it may raise.

    Args:
        numbers: the configurations to compile; None for all.
    """
    calls, compiled = _launches_of(run), list[Any]()
    with unshared():
        with _in_threads():
            for kernel, args, kwargs in calls:
                configs = getattr(kernel, "configs", None)
                inner = kernel.fn if configs is not None else kernel
                chosen = [c for i, c in enumerate(configs or ()) if numbers is None or i in numbers]
                for config in chosen if configs is not None else [None]:
                    options = config.all_kwargs() if config is not None else {}
                    # A configuration that does not compile is left out by the autotuner, or the call itself raises.
                    with contextlib.suppress(Exception):
                        compiled.append(inner.run(*args, **{**kwargs, **options, "warmup": True}))
        _build_launchers(compiled)


def build_launcher(kernel: Any) -> None:
    """Build the launcher of a kernel for an NVIDIA GPU into Triton's cache, in a process that has no GPU.

    Later versions of Triton have one launcher for all kernels.
    """
    # The first launch reports what is wrong.
    with contextlib.suppress(Exception):
        from triton.backends.nvidia import driver

        if hasattr(driver, "make_launcher"):
            driver.CudaLauncher(kernel.src, kernel.metadata)


def find_libraries() -> None:
    """Let Triton find the driver's library, which takes a process that runs ``ldconfig``, once before workers fork."""
    with contextlib.suppress(Exception):
        from triton.backends.nvidia import driver

        driver.library_dirs()


def _build_launchers(compiled: Sequence[Any]) -> None:
    """Build the launchers of compiled kernels into Triton's cache, one for each signature.

    In Triton 3.6 a C compiler builds one at the first launch, which takes 0.2 s of a processor. Others would wait for that.
    """
    from triton.runtime.driver import driver

    found: dict[str, Any] = {}
    for kernel in compiled:
        with contextlib.suppress(Exception):  # it did not compile
            whole = kernel.result() if hasattr(kernel, "result") else kernel
            found[f"{whole.src.signature} {sorted(whole.src.constants)}"] = whole

    def build(kernel: Any) -> None:
        # The first launch reports what is wrong.
        with contextlib.suppress(Exception):
            driver.active.launcher_cls(kernel.src, kernel.metadata)

    with ThreadPoolExecutor(COMPILER_THREADS) as pool:
        list(pool.map(build, found.values()))


def _launches_of(run: Callable[[], object]) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The launches of a call, without running them."""
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    originals = {kind: kind.run for kind in (JITFunction, Autotuner, Heuristics)}

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(calls) < MOST_CALLS:
            calls.append((self, args, kwargs))

    for kind in originals:
        setattr(kind, "run", noted)  # noqa: B010 - mypy refuses to assign methods
    try:
        with contextlib.suppress(Exception):
            run()
    finally:
        for kind, original in originals.items():
            setattr(kind, "run", original)  # noqa: B010
    return calls


@contextlib.contextmanager
def _in_threads() -> Iterator[None]:
    """Compile several kernels at a time, as far as this version of Triton can."""
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
    except ImportError:
        yield
        return
    try:
        # Launches report kernels that do not compile.
        with ThreadPoolExecutor(COMPILER_THREADS) as pool, AsyncCompileMode(pool, ignore_errors=True):
            yield
    finally:
        # Triton 3.6 keeps the mode active if an exception is raised at its end. Later launches would wait for the ended pool.
        active_mode.set(None)
