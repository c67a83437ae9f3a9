"""The fork server's own side: imports modules, waits, and forks workers. While it forks, it runs a single thread."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mtmc_lsp.process.cache_files import cache_folder
from mtmc_lsp.process.priority import limit_to_cores
from mtmc_lsp.process.supervisor import adopt_orphans, children

MAX_MESSAGE_BYTES = 1 << 17
CAPTURE_MODULES = (
    "torch._higher_order_ops.triton_kernel_wrap",
    "torch._dynamo",
    "torch.export._trace",
    "torch._functorch.aot_autograd",
    "torch.utils.serialization",
    "triton.experimental.gluon",
)
"""What torch imports lazily for export, for operators around kernels and for saving tensors; it takes seconds."""
GPU_MEMORY_DEVICES = ("/dev/nvidia-uvm", "/dev/kfd")
COMPILER_MODULES = ("torch._inductor.compile_fx", "triton.compiler")
"""What the baselines and kernels of a GPU need."""


class ChangedVariable(NamedTuple):
    """An environment variable that imports changed; ``None`` if it is not set."""

    name: str
    before: str | None
    after: str | None


def serve_forks(
    server_file: int,
    import_dependencies: Callable[[str], bool],
    *,
    preload: bool = False,
    command_modules: Sequence[str] = (),
) -> tuple[Sequence[str], int]:
    """Fork workers until the client is gone. Returns in each forked worker, never in the fork server itself.

    The client may lend the fork server to other processes; each client can end only the workers that it forked. A client may
    also ask for a branch: a forked fork server that has imported the dependencies of a user's file.

    Args:
        server_file: descriptor of the socket to the first client.
        import_dependencies: imports what the user's file with a path imports; branches call it. It returns whether the file
            then runs in a forked process as in one that imported nothing.
        preload: whether to import what capture needs and, while idle, the compilers.
        command_modules: modules of the worker commands to import with ``preload``.

    Returns:
        The worker's command line options and the descriptor for its answers.
    """
    # Garbage collection would write to the memory of all imported objects, and workers could not share it any more.
    gc.disable()
    _cache_bytecode()
    # The interpreter needs no compilers.
    compiles = preload and not _interprets()
    hashing = threading.Thread(target=_hash_triton)
    if compiles:
        hashing.start()
    _import_torch()
    for name in (*CAPTURE_MODULES, *command_modules) if preload else ():
        _preload(name)
    if compiles:
        hashing.join()
    pending = list(COMPILER_MODULES if compiles else ())
    return _serve_clients(server_file, pending, import_dependencies)


def _serve_clients(
    server_file: int,
    pending: list[str],
    import_dependencies: Callable[[str], bool],
    variables: Sequence[ChangedVariable] = (),
) -> tuple[Sequence[str], int]:
    """Serve the owner at the other end of a socket and all borrowers; import ``pending`` modules while idle.

    Args:
        variables: the environment variables that imports changed; workers get the same changes.
    """
    owner = socket.socket(fileno=server_file)
    owner.set_inheritable(False)
    adopt_orphans()
    signal_ends = os.pipe()
    for end in signal_ends:
        os.set_blocking(end, False)
    signal_reader, signal_writer = signal_ends
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(signal_writer)
    # Each client with the ids of its workers.
    clients: dict[socket.socket, set[int]] = {owner: set()}
    while True:
        sources: list[Any] = [*clients, signal_reader]
        ready, _, _ = select.select(sources, [], [], 0.0 if pending else None)
        if not ready:
            _preload(pending.pop(0))
            continue
        if signal_reader in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(signal_reader, 1 << 12)
            _report_exits(clients)
        for client in clients.keys() & set(ready):
            data, files, _, _ = _receive(client)
            if not data:
                _kill_groups(clients.pop(client))
                client.close()
                if client is owner:
                    for workers in clients.values():
                        _kill_groups(workers)
                    os._exit(0)
                continue
            message = json.loads(data)
            if message.get("lend"):
                borrower = socket.socket(fileno=files[0])
                borrower.set_inheritable(False)
                clients[borrower] = set()
                continue
            gc.freeze()
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in signal_ends:
                    os.close(end)
                # User code must not be able to request forks.
                for each in clients:
                    each.close()
                if "branch" in message:
                    _adapt(message)
                    changed = _warm_branch(functools.partial(import_dependencies, message["branch"]))
                    return _serve_clients(files[0], pending, import_dependencies, changed)
                gc.enable()
                return _become_worker(message, files, variables)
            # Both processes set the group, so that the client can kill it as soon as it knows the id.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            for file in files:
                os.close(file)
            clients[client].add(pid)
            if "branch" not in message:
                _send(client, {"pid": pid})


def _receive(client: socket.socket) -> tuple[bytes, list[int], int, Any]:
    """One message; empty if the client ended."""
    try:
        return socket.recv_fds(client, MAX_MESSAGE_BYTES, 3)
    except OSError:
        return b"", [], 0, None


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _unload_interpreter() -> None:
    """Let a worker that compiles import triton again: triton chooses the interpreter or the compiler at import.

    Its native library stays; it is the same for both and cannot be loaded twice.
    """
    for name in [*sys.modules]:
        if (name == "triton" or name.startswith("triton.")) and not name.startswith("triton._C"):
            del sys.modules[name]


def _preload(name: str) -> None:
    """Import a module without starting CUDA; errors are left to the workers."""
    with contextlib.suppress(Exception), _without_cuda():
        importlib.import_module(name)


def _warm_branch(import_all: Callable[[], bool]) -> list[ChangedVariable]:
    """Import what a user's file imports; ends the process if each worker must do that itself.

    Threads, child processes and CUDA do not survive a fork, and a module that could not ask for the GPU at import may have
    decided wrongly. Folders, signal handlers and numbers of threads are set anew in each worker.

    Returns:
        The environment variables that the imports changed.
    """
    import torch

    threads, folder, interprets, variables = torch.get_num_threads(), os.getcwd(), _interprets(), dict(os.environ)
    # A pool of OpenMP threads would not survive a fork either; a single thread needs none.
    torch.set_num_threads(1)
    with _without_cuda() as refused, _noting_calls(torch, "set_num_threads") as calls:
        is_fit = import_all()
    is_changed = (
        not is_fit
        or refused
        or calls
        or threading.active_count() > 1
        or children()
        or _uses_gpu()
        or os.getcwd() != folder
        or _interprets() != interprets
        or signal.getsignal(signal.SIGCHLD) is not signal.SIG_DFL
        # Sandboxed workers have their own folder for temporary files.
        or tempfile.tempdir is not None
    )
    if is_changed:
        os._exit(1)
    torch.set_num_threads(threads)
    names = {**variables, **os.environ}
    changes = [ChangedVariable(name, variables.get(name), os.environ.get(name)) for name in names]
    return [change for change in changes if change.before != change.after]


@contextlib.contextmanager
def _noting_calls(module: Any, name: str) -> Iterator[list[str]]:
    """Note the calls of a function."""
    original, calls = getattr(module, name), list[str]()

    @functools.wraps(original)
    def noted(*arguments: Any) -> Any:
        calls.append(name)
        return original(*arguments)

    with _patched([(module, name, noted)]):
        yield calls


def _uses_gpu() -> bool:
    """Whether a library opened the GPU's memory manager, as every CUDA program does."""
    with contextlib.suppress(OSError):
        for entry in os.scandir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).startswith(GPU_MEMORY_DEVICES):
                    return True
    return False


@contextlib.contextmanager
def _without_cuda() -> Iterator[list[str]]:
    """Refuse to start CUDA, which no forked worker could start again.

    Modules that ask for a GPU and for Triton at import are told that both exist, on a machine with a GPU.

    Yields:
        The names of the functions that were refused.
    """
    import torch
    from torch.utils import _triton

    refused: list[str] = []

    def refuse(*_: object) -> None:
        refused.append("cuda")
        raise RuntimeError("a fork server must not start CUDA")

    patches: list[tuple[Any, str, Any]] = [(torch.cuda, "_lazy_init", refuse)]
    if hasattr(torch._C, "_cuda_getDeviceCount"):
        patches += [(torch._C, "_cuda_getDeviceCount", refuse)]
    if _interprets():
        patches += [(torch.cuda, "is_available", lambda: False)]
    else:
        patches += [(_triton, "has_triton", functools.cache(lambda: True))]
        patches += [(torch.cuda, "is_available", lambda: True)]
    with _patched(patches):
        yield refused


@contextlib.contextmanager
def _patched(patches: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replace attributes of modules, except where the user's modules replace them in turn."""
    originals = [getattr(module, key) for module, key, _ in patches]
    for module, key, value in patches:
        setattr(module, key, value)
    try:
        yield
    finally:
        for (module, key, value), original in zip(patches, originals, strict=True):
            if getattr(module, key) is value:
                setattr(module, key, original)


def _cache_bytecode() -> None:
    """Keep compiled modules in our cache folder if torch's are not next to their sources.

    The site-packages of a container are often installed without them and not writable. Compiling takes 3 of the 12 s that a
    fork server needs to import torch, export and the compilers (H200 host).
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or os.path.exists(importlib.util.cache_from_source(torch.origin)):
        return
    sys.pycache_prefix = str(cache_folder() / "bytecode")
    sys.dont_write_bytecode = False


def _import_torch() -> None:
    """Import what every worker needs; the first request of a worker reports what is missing."""
    with contextlib.suppress(Exception):
        import torch  # noqa: F401
    if _interprets():
        with contextlib.suppress(Exception):
            import triton.runtime.interpreter  # noqa: F401


def _hash_triton() -> None:
    """Compute Triton's part of the keys of compiled kernels, a hash of hundreds of megabytes, which workers then inherit."""
    with contextlib.suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()


def _report_exits(clients: Mapping[socket.socket, set[int]]) -> None:
    """Report the workers that ended to their clients, and end the processes that they left behind."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            break
        for client, workers in clients.items():
            if pid in workers:
                workers.discard(pid)
                _send(client, {"exited": pid, "code": os.waitstatus_to_exitcode(status)})
    for orphan in children().difference(*clients.values()):
        with contextlib.suppress(OSError):
            os.kill(orphan, signal.SIGKILL)


def _send(client: socket.socket, message: dict[str, int]) -> None:
    with contextlib.suppress(OSError):
        client.send(json.dumps(message).encode())


def _kill_groups(workers: set[int]) -> None:
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _limit_to_cores(cores: Sequence[int]) -> None:
    """Run on the client's cores, with as many threads: torch counted the fork server's cores when it was imported."""
    limit_to_cores(cores)
    torch = sys.modules.get("torch")
    if torch is not None and len(cores) < torch.get_num_threads():
        torch.set_num_threads(len(cores))


def _adapt(message: dict[str, Any]) -> None:
    """Take over the folder, the variables and the cores of the client."""
    environment = message["env"]
    if _interprets() and environment.get("TRITON_INTERPRET") != "1":
        _unload_interpreter()
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    _limit_to_cores(message["cores"])
    # The fork server may have cached its own temporary folder.
    tempfile.tempdir = None
    os.chdir(message["cwd"])


def _become_worker(
    message: dict[str, Any], files: Sequence[int], variables: Sequence[ChangedVariable]
) -> tuple[Sequence[str], int]:
    """Turn the forked process into what a new process would be, after the imports that changed these variables."""
    requests, output, answers = files
    os.dup2(requests, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for file in (requests, output):
        os.close(file)
    sys.stdin = os.fdopen(0, "r", encoding="utf-8", closefd=False)
    _adapt(message)
    for variable in variables:
        if os.environ.get(variable.name) != variable.before:
            continue  # the client sets it for this worker
        if variable.after is None:
            os.environ.pop(variable.name, None)
        else:
            os.environ[variable.name] = variable.after
    return message["options"], answers
