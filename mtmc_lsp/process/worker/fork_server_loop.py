"""The template's own side: imports, waits, and makes copies of itself. Needs one thread only, for it forks."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtmc_lsp.process.priority import keep_to

MESSAGE = 1 << 17
SET_CHILD_SUBREAPER = 36
PRELOADED_MODULES = (
    "torch._higher_order_ops.triton_kernel_wrap",
    "torch._dynamo",
    "torch.export._trace",
    "torch._functorch.aot_autograd",
    "torch.utils.serialization",
    "triton.experimental.gluon",
)
"""What a captured function, the operator around a kernel and the handing over of tensors need: seconds of importing, not needed
for torch itself."""
COMPILER_MODULES = ("torch._inductor.compile_fx", "triton.compiler")
"""What a GPU's baselines and kernels need."""


def serve_forks(
    number: int, *, preload: bool = False, command_modules: Sequence[str] = ()
) -> tuple[Sequence[str], int]:
    """Make copies until the other side is gone; returns in each copy, never in the template itself.

    The other side may lend it to further ones; each of them can end its own copies alone.

    Args:
        number: the descriptor that requests come on.
        preload: whether copies also have what capturing needs, and, as far as nobody asks for a copy meanwhile, compiling.
        command_modules: modules of commands that copies will be asked for; they are imported ahead too.

    Returns:
        The copy's options, and the descriptor of its answers.
    """
    line = socket.socket(fileno=number)
    line.set_inheritable(False)
    _adopt_orphans()
    # What is imported stays: copies neither look through it for garbage nor, by that, make pages of it their own.
    gc.disable()
    _import()
    for name in (*PRELOADED_MODULES, *command_modules) if preload else ():
        _preload(name)
    woken, waker = os.pipe()
    for end in (woken, waker):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    # Whoever asks for copies, with those that were made for it.
    lines: dict[socket.socket, set[int]] = {line: set()}
    # Compilers are of no use to the interpreter.
    later = list(COMPILER_MODULES if preload and not _interprets() else ())
    while True:
        sources: list[Any] = [*lines, woken]
        ready, _, _ = select.select(sources, [], [], 0.0 if later else None)
        if not ready:
            _preload(later.pop(0))
            continue
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 1 << 12)
            _report(lines)
        for asking in lines.keys() & set(ready):
            data, files, _, _ = _received(asking)
            if not data:
                _end(lines.pop(asking))
                asking.close()
                if asking is line:
                    for copies in lines.values():
                        _end(copies)
                    os._exit(0)
                continue
            message = json.loads(data)
            if message.get("lend"):
                borrower = socket.socket(fileno=files[0])
                borrower.set_inheritable(False)
                lines[borrower] = set()
                continue
            gc.freeze()
            pid = os.fork()
            if pid == 0:
                gc.enable()
                os.setpgid(0, 0)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (woken, waker):
                    os.close(end)
                # A copy runs what must not ask for others.
                for each in lines:
                    each.close()
                return _become(message, files)
            # In both, so that whoever is told the number can end the group.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            for file in files:
                os.close(file)
            lines[asking].add(pid)
            _say(asking, {"pid": pid})


def _received(line: socket.socket) -> tuple[bytes, list[int], int, Any]:
    """A message; none where the other side ended in the middle of one."""
    try:
        return socket.recv_fds(line, MESSAGE, 3)
    except OSError:
        return b"", [], 0, None


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _forget_interpreter() -> None:
    """Have triton imported anew by a copy that compiles: which of the two it is, it decides when it is imported.

    Its native part stays, which is the same for both and cannot be loaded twice.
    """
    for name in [*sys.modules]:
        if (name == "triton" or name.startswith("triton.")) and not name.startswith("triton._C"):
            del sys.modules[name]


def _preload(name: str) -> None:
    """Import without asking CUDA anything, which no copy could ask again; what cannot be is left to the copies.

    With a GPU, imports that ask whether there is one and whether kernels can be compiled are told that it is so.
    """
    with contextlib.suppress(Exception):
        import torch
        from torch.utils import _triton

        changes: list[tuple[Any, str, Any]] = [(torch.cuda, "_lazy_init", _refuse)]
        if hasattr(torch._C, "_cuda_getDeviceCount"):
            changes += [(torch._C, "_cuda_getDeviceCount", _refuse)]
        if not _interprets():
            changes += [(_triton, "has_triton", functools.cache(lambda: True))]
            changes += [(torch.cuda, "is_available", lambda: True)]
        kept = [(place, key, getattr(place, key)) for place, key, _ in changes]
        for place, key, value in changes:
            setattr(place, key, value)
        try:
            importlib.import_module(name)
        finally:
            for place, key, value in kept:
                setattr(place, key, value)


def _refuse(*_: object) -> None:
    raise RuntimeError("CUDA must not be started here")


def _import() -> None:
    """What every worker needs; what is missing is said by the first request of a copy."""
    with contextlib.suppress(Exception):
        import torch  # noqa: F401
    if _interprets():
        with contextlib.suppress(Exception):
            import triton.runtime.interpreter  # noqa: F401


def _adopt_orphans() -> None:
    """What a copy starts and leaves behind becomes this process's child, wherever it moved to, and can be ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _report(lines: Mapping[socket.socket, set[int]]) -> None:
    """Tell which copies ended, and end what they left behind."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            break
        for line, copies in lines.items():
            if pid in copies:
                copies.discard(pid)
                _say(line, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})
    with contextlib.suppress(OSError):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
        for orphan in {int(word) for word in children.split()}.difference(*lines.values()):
            os.kill(orphan, signal.SIGKILL)


def _say(line: socket.socket, message: dict[str, int]) -> None:
    with contextlib.suppress(OSError):
        line.send(json.dumps(message).encode())


def _end(copies: set[int]) -> None:
    for pid in copies:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _keep_to(cores: Sequence[int]) -> None:
    """Run where whoever asked runs, with as many threads; torch counted the cores when it was imported."""
    keep_to(cores)
    torch = sys.modules.get("torch")
    if torch is not None and len(cores) < torch.get_num_threads():
        torch.set_num_threads(len(cores))


def _become(message: dict[str, Any], files: Sequence[int]) -> tuple[Sequence[str], int]:
    """Take the place of a process that was started by itself."""
    requests, output, answers = files
    os.dup2(requests, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for file in (requests, output):
        os.close(file)
    sys.stdin = os.fdopen(0, "r", encoding="utf-8", closefd=False)
    environment = message["env"]
    if _interprets() and environment.get("TRITON_INTERPRET") != "1":
        _forget_interpreter()
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    _keep_to(message["cores"])
    # It was looked up, perhaps, before this process had a folder of its own.
    tempfile.tempdir = None
    os.chdir(message["cwd"])
    return message["options"], answers
