"""Cross-compilation, run in a worker: every kernel of a candidate, for any architecture, with no GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from mtmc_lsp.capture.loading import load_user_module
from mtmc_lsp.core.jsonable import from_json, to_json
from mtmc_lsp.core.results import KernelReport
from mtmc_lsp.core.run import KernelLaunch

_modules: dict[str, Any] = {}


def compile_launches(request: dict[str, Any]) -> dict[str, Any]:
    """``{"path", "name", "source", "launches", "archs"}`` to ``{"kernels": [KernelReport, ...]}``."""
    launches = [from_json(KernelLaunch, item) for item in request["launches"]]
    try:
        module = _module(request["path"], request["source"], request["name"])
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return {"kernels": [to_json(KernelReport("", arch, error=text)) for arch in request["archs"][:1]]}
    reports = [_report(module, launch, arch) for launch in launches for arch in request["archs"]]
    return {"kernels": [to_json(report) for report in reports]}


def _module(path: str, source: str, name: str) -> Any:
    if source not in _modules:
        _modules[source] = load_user_module(path, source, f"{name}__compiled{len(_modules)}")
    return _modules[source]


def _target(arch: str) -> Any:
    from triton.backends.compiler import GPUTarget

    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch.removeprefix("sm_").rstrip("a")), 32)
    return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)


def _report(module: Any, launch: KernelLaunch, arch: str) -> KernelReport:
    import triton

    kernel = getattr(module, launch.kernel)
    names = kernel.arg_names
    signature = {n: launch.signature.get(n, "constexpr") for n in names}
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in launch.divisible_by_16 if n in names}
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=dict(launch.constexprs), attrs=attrs)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    try:
        compiled = triton.compile(source, target=_target(arch), options=options)
    except Exception as error:
        return KernelReport(launch.kernel, arch, error=f"{type(error).__name__}: {_last_line(error)}")
    shared = int(getattr(compiled.metadata, "shared", 0))
    registers = spills = None
    if arch.startswith("sm_"):
        registers, spills = _resources(compiled.asm.get("cubin", b""))
    occupancy = _occupancy(registers, shared, launch.num_warps, arch) if registers else None
    limit = SHARED_LIMIT.get(arch)
    if limit is not None and shared > limit:
        return KernelReport(
            launch.kernel,
            arch,
            registers,
            spills,
            shared,
            0.0,
            f"needs {shared} bytes of shared memory, {arch} has {limit}",
        )
    return KernelReport(launch.kernel, arch, registers, spills, shared, occupancy)


SHARED_LIMIT = {"sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_90": 232448, "gfx942": 65536, "gfx90a": 65536}
"""Bytes of shared memory (LDS) that one block can use."""

SHARED_PER_SM = {"sm_80": 167936, "sm_86": 102400, "sm_89": 102400, "sm_90": 233472}
WARPS_PER_SM = {"sm_80": 64, "sm_86": 48, "sm_89": 48, "sm_90": 64}


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _resources(cubin: bytes) -> tuple[int | None, int | None]:
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
    registers = re.search(r"REG:(\d+)", done.stdout)
    stack = re.search(r"STACK:(\d+)", done.stdout)
    return (int(registers[1]) if registers else None), (int(stack[1]) if stack else None)


def _occupancy(registers: int, shared: int, warps: int, arch: str) -> float | None:
    """Resident warps over the most an SM holds (CUDA occupancy calculator, registers in units of 256 per warp)."""
    if arch not in WARPS_PER_SM:
        return None
    per_warp = -(-registers * 32 // 256) * 256
    blocks = min(65536 // (per_warp * warps), WARPS_PER_SM[arch] // warps, 32)
    if shared:
        blocks = min(blocks, SHARED_PER_SM[arch] // (shared + 1024))
    return blocks * warps / WARPS_PER_SM[arch]
