"""Cross-compilation, run in a worker: every kernel of a candidate, for any architecture, with no GPU."""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from mtmc_lsp.capture.worker.user_module import load_user_module
from mtmc_lsp.compile.messages import CompileReports, CompileRequest, CompileVariantsRequest, PrepareCompilerRequest
from mtmc_lsp.compile.occupancy import SHARED_LIMIT, occupancy
from mtmc_lsp.compile.worker.find_launches import find_launches
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.results import CompileReport, KernelReport
from mtmc_lsp.core.run import DTYPE, KernelLaunch
from mtmc_lsp.process.priority import usable_cores
from mtmc_lsp.process.protocol import NoAnswer
from mtmc_lsp.process.worker.kernel_compilation import build_launcher, find_libraries, share_kernels

_modules: dict[str, Any] = {}


Job = tuple[Any, KernelLaunch, str, bool]
"""A module, a launch of one of its kernels, the architecture to compile for, and whether to build the launcher."""


def prepare(request: PrepareCompilerRequest) -> NoAnswer:
    """Do what the first compilation would do before it compiles. Its report says what is missing."""
    with contextlib.suppress(ImportError):
        import triton.compiler  # noqa: F401
    _hash_triton()
    return NoAnswer()


def compile_launches(request: CompileRequest) -> CompileReport:
    """Compile every launch for every architecture."""
    return _compile_versions([request], request.seconds)[0]


def compile_variants(request: CompileVariantsRequest) -> CompileReports:
    """Compile every launch of several versions; kernels of all versions run in parallel."""
    return CompileReports(tuple(_compile_versions(request.versions, request.seconds)))


def _compile_versions(versions: Sequence[CompileRequest], seconds: float) -> list[CompileReport]:
    start = time.monotonic()
    jobs: list[Job] = []
    places: list[KernelReport | tuple[int, int]] = []
    for version in versions:
        try:
            launches = _jobs(version)
        except Exception as error:
            places.append(KernelReport("", version.archs[0], error=_message(error)))
        else:
            places.append((len(jobs), len(jobs) + len(launches)))
            jobs += launches
    compiled = _compile_in_parallel(jobs, start + seconds)
    taken = time.monotonic() - start
    return [
        CompileReport((place,) if isinstance(place, KernelReport) else tuple(compiled[slice(*place)]), taken)
        for place in places
    ]


def _jobs(request: CompileRequest) -> list[Job]:
    """One job for each launch and architecture of a version."""
    launches = list(request.launches)
    module = _module(request.path, request.source, request.name)
    if request.calls is not None:
        launcher = getattr(module, request.calls.launcher)
        for inputs in request.calls.inputs:
            launches += find_launches(launcher, inputs, request.calls.trained)
    launches = list({repr(launch): launch for launch in launches}.values())
    if request.builds_launchers:
        find_libraries()
    return [(module, launch, arch, request.builds_launchers) for launch in launches for arch in request.archs]


def _module(path: str, source: str, name: str) -> Any:
    if source not in _modules:
        _modules[source] = load_user_module(path, source, f"{name}__compiled{len(_modules)}")
        share_kernels(_modules[source])
    return _modules[source]


def _compile_in_parallel(jobs: Sequence[Job], deadline: float) -> list[KernelReport]:
    """Compile in forked children, one per core, so that a compiler that crashes or hangs costs only one job."""
    if jobs:
        _hash_triton()
    context = multiprocessing.get_context("fork")
    reports: dict[int, KernelReport] = {}
    running: dict[Connection, tuple[int, Any]] = {}
    waiting = list(range(len(jobs)))
    cores = len(usable_cores())
    while waiting or running:
        while waiting and len(running) < cores:
            index = waiting.pop(0)
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(target=_job, args=(*jobs[index], sending))
            process.start()
            sending.close()
            running[receiving] = (index, process)
        ready = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        for connection in ready or list(running):
            assert isinstance(connection, Connection)
            index, process = running.pop(connection)
            reports[index] = _answer(connection, process, jobs[index], timed_out=not ready)
    return [reports[index] for index in range(len(jobs))]


def _hash_triton() -> None:
    """Let Triton hash its files for its cache keys: hundreds of megabytes, read once here instead of in each child."""
    with contextlib.suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()


def _job(module: Any, launch: KernelLaunch, arch: str, builds_launcher: bool, sending: Connection) -> None:
    sending.send(to_json(_report(module, launch, arch, builds_launcher)))
    sending.close()


def _answer(connection: Connection, process: Any, job: Job, *, timed_out: bool) -> KernelReport:
    _, launch, arch, _ = job
    if timed_out:
        process.kill()
        report = KernelReport(launch.kernel, arch, error="compiling took too long", ran_out_of_time=True)
    else:
        try:
            report = from_json(KernelReport, connection.recv())
        except EOFError:
            process.join()
            report = KernelReport(launch.kernel, arch, error=f"the compiler crashed with exit code {process.exitcode}")
    process.join()
    connection.close()
    return report


def _target(arch: str) -> Any:
    from triton.backends.compiler import GPUTarget

    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch.removeprefix("sm_").rstrip("a")), 32)
    return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)


def _report(module: Any, launch: KernelLaunch, arch: str, builds_launcher: bool) -> KernelReport:
    import triton

    try:
        kernel = _kernel(module, launch.kernel)
        source = ast_source(kernel, launch, _target(arch))
        options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
        compiled = triton.compile(source, target=_target(arch), options=options)
    except Exception as error:
        return KernelReport(launch.kernel, arch, error=_message(error))
    shared = int(getattr(compiled.metadata, "shared", 0))
    if arch.startswith("sm_"):
        registers, spills = _nvidia_resources(compiled.asm.get("cubin", b""))
    else:
        registers, spills = _amd_resources(str(compiled.asm.get("amdgcn", "")))
    resident = occupancy(registers, shared, launch.num_warps, arch) if registers else None
    limit = SHARED_LIMIT.get(arch)
    if builds_launcher:
        build_launcher(compiled)
    excess = f"needs {shared} bytes of shared memory, {arch} has {limit}" if limit and shared > limit else ""
    return KernelReport(
        launch.kernel, arch, registers, spills, shared, 0.0 if excess else resident, excess, bool(excess)
    )


def ast_source(kernel: Any, launch: KernelLaunch, target: Any) -> Any:
    """The compiler's input, equal to that of a real launch, so that the launch finds the kernel in Triton's cache.

    The cache key contains all attributes of parameters, whose format depends on the version of Triton.
    """
    import triton

    names = kernel.arg_names
    values = {name: _value(launch.constexprs.get(name)) for name in names}
    special: list[tuple[str, object]] = []
    for name in names:
        kind = launch.signature.get(name)
        # An integer or pointer is divisible by 16 ("D") or has an empty attribute; a float or truth value has none.
        has_none = not kind or kind.startswith(("fp", "u1"))
        divisible = "D" if name in launch.divisible_by_16 else (None if has_none else "")
        special.append(("constexpr", values[name]) if kind is None else (kind, divisible))
    try:
        backend = triton.compiler.make_backend(target)
        _, signature, constexprs, attrs = kernel._pack_args(backend, {}, values, special, {})
    except (AttributeError, TypeError, ValueError):
        # Another version of Triton: its launches will compile again.
        signature = {name: launch.signature.get(name, "constexpr") for name in names}
        constexprs = {name: _value(value) for name, value in launch.constexprs.items()}
        attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in launch.divisible_by_16}
    return triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)


def _value(constant: object) -> object:
    import triton.language as tl

    is_dtype = isinstance(constant, str) and constant.startswith(DTYPE)
    return tl.dtype(str(constant).removeprefix(DTYPE)) if is_dtype else constant


def _kernel(module: Any, name: str) -> Any:
    """The ``JITFunction`` inside wrappers such as the autotuner."""
    import triton

    kernel = getattr(module, name)
    while hasattr(kernel, "fn") and not isinstance(kernel, triton.runtime.JITFunction):
        kernel = kernel.fn
    return kernel


def _message(error: Exception) -> str:
    """The last line that is not empty; Triton's errors quote the source before it."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:300] if lines else ''}"


def _nvidia_resources(cubin: bytes) -> tuple[int | None, int | None]:
    """Registers per thread and bytes of stack, from the bundled cuobjdump."""
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    if not cubin or not tool.exists():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, timeout=60, check=False
        )
    return _number(r"REG:(\d+)", done.stdout), _number(r"STACK:(\d+)", done.stdout)


def _amd_resources(assembly: str) -> tuple[int | None, int | None]:
    """Vector registers per lane and bytes of scratch, from the metadata at the end of the assembly."""
    return _number(r"\.vgpr_count:\s*(\d+)", assembly), _number(r"\.private_segment_fixed_size:\s*(\d+)", assembly)


def _number(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return int(match[1]) if match else None
