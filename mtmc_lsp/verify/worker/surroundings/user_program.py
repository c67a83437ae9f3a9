"""Makes this process look like a user's program that imports a candidate, as far as the machine allows. Runs in workers.

A candidate that recognises the verification can be right there and wrong in use. So one more case runs where the stack, the names
of modules, the arguments, the environment and new memory are as in a program. `docs/verify.md` lists what still differs.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

from mtmc_lsp.process.worker.scratch import hide_variables, scratch_folder
from mtmc_lsp.process.worker_process import CACHE_VARIABLES

SCRIPT = "main.py"
PROGRAM = """\
def main():
    with inference, gradients, mode:
        return function()


try:
    result = main()
except BaseException as error:
    failure = error
finally:
    done()
"""
"""The program's text; its names are those of a namespace that it runs in."""
OURS = "mtmc_lsp"
MOST_WAITS, WAIT_SECONDS = 1000, 0.001
"""For the end of the program's thread. Threads of the candidate may run on, which is a finding."""
OF_OUR_STARTS = ("PYTHONDONTWRITEBYTECODE", "OPENBLAS_NUM_THREADS")


class UserProgram:
    """The program, which starts a new thread for each call: the thread's stack begins in the program's file."""

    def __init__(self, candidate: str, *, keeps_caches: bool) -> None:
        """Change the process for its whole life.

        Args:
            candidate: path of the candidate's file; the program is beside it.
            keeps_caches: whether compilers need the variables with folders for their caches.
        """
        self._path = str(Path(candidate).resolve().parent / SCRIPT)
        self._code: CodeType = compile(PROGRAM, self._path, "exec")
        self._main = ModuleType("__main__")
        self._main.__file__ = self._path
        self._hide_environment(keeps_caches)
        self._hide_arguments()
        self._hide_limits()
        # As a user's program fills new memory, and computes.
        torch._C._set_deterministic_algorithms(False, warn_only=False)
        for thread in threading.enumerate():
            if thread is not threading.main_thread():
                threading._active.pop(thread.ident, None)  # type: ignore[attr-defined]

    def run(self, function: Callable[[], Any], mode: contextlib.AbstractContextManager[Any]) -> Any:
        """Call a function from the program, in a context of its thread.

        Raises:
            BaseException: what the function raised.
        """
        lock = _thread.allocate_lock()
        lock.acquire()
        namespace = vars(self._main)
        # Torch's modes belong to threads.
        inference = torch.inference_mode(torch.is_inference_mode_enabled())
        gradients = _Gradients(torch.is_grad_enabled())
        namespace.update(inference=inference, gradients=gradients, mode=mode, function=function, done=lock.release)
        running = _thread._count()
        with self._hidden_modules():
            thread = _thread.start_new_thread(exec, (self._code, namespace))
            lock.acquire()
        _wait_for_threads(running, lock)
        threading._active.pop(thread, None)  # type: ignore[attr-defined]
        result, failure = namespace.pop("result", None), namespace.pop("failure", None)
        for name in ("inference", "gradients", "mode", "function", "done"):
            del namespace[name]
        if failure is not None:
            raise failure
        return result

    @contextlib.contextmanager
    def _hidden_modules(self) -> Iterator[None]:
        """Let the program find itself as the main module, and none of ours."""
        ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == OURS}
        ours["__main__"] = sys.modules["__main__"]
        for name in ours:
            del sys.modules[name]
        sys.modules["__main__"] = self._main
        try:
            yield
        finally:
            sys.modules.update(ours)

    def _hide_environment(self, keeps_caches: bool) -> None:
        hide_variables()
        tempfile.tempdir = scratch_folder()
        hidden = (*OF_OUR_STARTS, *(() if keeps_caches else CACHE_VARIABLES))
        for name in hidden:
            os.environ.pop(name, None)
        os.environ["_"] = sys.executable
        sys.dont_write_bytecode = False

    def _hide_arguments(self) -> None:
        sys.argv[:] = [self._path]
        sys.orig_argv[:] = [sys.executable, self._path]
        folder = str(Path(self._path).parent)
        if folder in sys.path:
            sys.path.remove(folder)
        sys.path.insert(0, folder)
        with contextlib.suppress(OSError, ValueError, IndexError):
            _set_command_line([sys.executable, SCRIPT])

    def _hide_limits(self) -> None:
        with contextlib.suppress(ImportError):
            import resource

            original, ours = resource.getrlimit, (resource.RLIMIT_DATA, resource.RLIMIT_FSIZE)
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)

            def getrlimit(kind: int) -> tuple[int, int]:
                return unlimited if kind in ours else original(kind)

            resource.getrlimit = getrlimit


class _Gradients:
    """Sets gradient mode in the thread that enters it, which then is the main thread for Python, too."""

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on

    def __enter__(self) -> None:
        torch._C._set_grad_enabled(self._is_on)
        threading._active[_thread.get_ident()] = threading.main_thread()  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        """The thread ends."""


def _set_command_line(words: list[str]) -> None:
    """Change what ``/proc/self/cmdline`` shows, in the memory where Linux reads it."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    # Fields 48 and 49 of the file; the split text begins with field 3.
    start, end = int(fields[45]), int(fields[46])
    text = b"\0".join(word.encode() for word in words) + b"\0"
    if 0 < start < end and len(text) <= end - start:
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _wait_for_threads(count: int, lock: Any) -> None:
    """Wait until at most ``count`` threads run. A thread still counts for a short time after its last statement.

    Args:
        count: number of threads before the program's thread started.
        lock: is locked, and nothing releases it.
    """
    for _ in range(MOST_WAITS):
        if _thread._count() <= count:
            return
        lock.acquire(timeout=WAIT_SECONDS)
